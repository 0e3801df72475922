"""A mount's process that is killed while it tells the kernel of a change, which waits for a request
that it will never answer."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mount import guard
from mount.control import open_abort
from mount.point import abort, find_mount, prepare, umount_command

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "stuck_probe.py"
DEADLINE_S = 20.0
CREATE = "import sys; open(sys.argv[1], 'x')"

Killed = Callable[[str], tuple[Path, subprocess.Popen[str]]]


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Killed]:
    """Makes a mount whose process was killed, and a program that waits for it."""
    if os.geteuid():
        pytest.skip("only root may end the connection of a mount that was killed")
    place, store = tmp_path / "mount", tmp_path / "store"
    place.mkdir()
    store.mkdir()
    processes: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        processes.append(process)
        return process

    def make(mode: str) -> tuple[Path, subprocess.Popen[str]]:
        server = start(PROGRAM, place, store, mode)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", server.stdout.read()
        user = start("-c", CREATE, place / "new")
        assert server.stdout.readline() == "stuck\n"
        server.kill()
        return place, user

    try:
        yield make
    finally:
        entry = find_mount(place)
        if entry is not None:
            abort(entry)
            subprocess.run(["umount", "-l", place], check=True, timeout=DEADLINE_S)
        for process in processes:
            process.kill()
            process.wait(DEADLINE_S)
            assert process.stdout is not None
            process.stdout.close()


def error_of(user: subprocess.Popen[str]) -> str:
    """What a program that waited for the mount was told."""
    said, _ = user.communicate(timeout=DEADLINE_S)
    return said.splitlines()[-1]


def test_nobody_waits_for_a_process_that_was_killed(killed: Killed) -> None:
    place, user = killed("guarded")
    assert "connection abort" in error_of(user)
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(place)


def test_a_mount_takes_the_place_of_one_that_cannot_go(killed: Killed) -> None:
    place, user = killed("alone")
    assert prepare(place, []) == place
    assert find_mount(place) is None
    assert "connection abort" in error_of(user)


def test_umount_ends_a_process_that_cannot_go(killed: Killed) -> None:
    place, user = killed("alone")
    assert umount_command(place, lazy=True) == 0
    assert find_mount(place) is None
    assert "connection abort" in error_of(user)


def test_no_connection_has_the_number_of_another_device() -> None:
    assert open_abort("0:1048575") is None


def test_a_mount_serves_also_where_no_process_can_be_started_to_guard_it(
    monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("no guard, should this mount be killed: ")
    monkeypatch.setattr(guard, "open_abort", lambda device: os.open(os.devnull, os.O_WRONLY))
    monkeypatch.setattr(sys, "executable", "/missing/python")
    descriptors = os.listdir("/proc/self/fd")
    with guard.guarded("0:1"):
        assert os.listdir("/proc/self/fd") == descriptors
