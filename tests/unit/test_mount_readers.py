"""Whose thread it is that opens a file in the mount."""

import os
import threading
from pathlib import Path

from kvfs.config import PREFETCH_READERS_MAX
from mount.readers import Readers


def test_the_threads_of_a_process_are_one_reader() -> None:
    readers, found = Readers(), []
    thread = threading.Thread(
        target=lambda: found.append(readers.process_of(threading.get_native_id()))
    )
    thread.start()
    thread.join()
    assert [*found, readers.process_of(os.getpid())] == [os.getpid()] * 2


def test_a_thread_of_which_nothing_can_be_found_out(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "status").write_bytes(b"Name:\tno such field\n")
    readers = Readers(tmp_path)
    assert [readers.process_of(thread) for thread in (0, 4, 5)] == [None, 4, 5]


def test_few_are_remembered(tmp_path: Path) -> None:
    readers = Readers(tmp_path)
    for thread in range(1, PREFETCH_READERS_MAX + 9):
        readers.process_of(thread)
    assert len(readers._processes) == PREFETCH_READERS_MAX
