"""The bridge's threads: work in its order, surprises logged, and no engine that cannot end."""

import subprocess
import sys
import threading
from pathlib import Path

from kvfs.reader.workers import Workers

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0
HANGS = """
import threading
from kvfs.reader.workers import Workers
began = threading.Event()
workers = Workers(2, "test")
workers.start(lambda: (began.set(), threading.Event().wait()))
began.wait()
workers.close()
"""


def test_work_is_done_in_its_order_whatever_fails(allow_warnings: list[str]) -> None:
    allow_warnings.append("work on test failed in an unforeseen way")
    workers = Workers(1, "test")
    done: list[int] = []
    assert workers.start(done.append, 1)
    assert workers.start(lambda: 1 // 0)
    assert workers.start(done.append, 2)
    ended = threading.Event()
    assert workers.start(ended.set)
    assert ended.wait(WAIT_S)
    assert done == [1, 2]
    workers.close()


def test_what_was_taken_is_done_after_the_end_and_nothing_more_is_taken() -> None:
    workers = Workers(1, "test")
    go_on, ended = threading.Event(), threading.Event()
    workers.start(go_on.wait, WAIT_S)
    workers.start(ended.set)
    workers.close()
    workers.close()
    assert not workers.start(ended.clear)
    go_on.set()
    assert ended.wait(WAIT_S)


def test_a_read_that_hangs_does_not_keep_its_process() -> None:
    subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, check=True, timeout=WAIT_S)
