"""Starting a process that says when it is ready, or why it is not."""

import os
import signal
import time
from pathlib import Path

import pytest

from kvfs.daemon import start_in_background
from kvfs.errors import KvfsError, Unavailable
from tests.processes import wait_until

MODULE = """
import sys, time, os
from kvfs.daemon import take_orders, tell_ready, tell_failure
orders = take_orders()
print("out", flush=True)
if orders["do"] == "ready":
    tell_ready()
    time.sleep(60)
elif orders["do"] == "fail":
    tell_failure("because of this")
    sys.exit(2)
elif orders["do"] == "die":
    sys.exit(3)
else:
    time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "background_example.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "background_example"


def start(module: str, tmp_path: Path, do: str, deadline_s: float = 30) -> int:
    return start_in_background(module, {"do": do}, tmp_path / "log", deadline_s)


def test_ready(module: str, tmp_path: Path) -> None:
    pid = start(module, tmp_path, "ready")
    try:
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert (tmp_path / "log").read_text() == "out\n"
        # The pipe for being ready goes a moment after the word on it.
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == 3)
        held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)]
        assert held == ["/dev/null", str(tmp_path / "log"), str(tmp_path / "log")]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_failure_in_its_own_words(module: str, tmp_path: Path) -> None:
    with pytest.raises(KvfsError, match=r"^because of this$"):
        start(module, tmp_path, "fail")


def test_an_early_end(module: str, tmp_path: Path) -> None:
    with pytest.raises(KvfsError, match=r"ended before it served; see .*log"):
        start(module, tmp_path, "die")


def test_a_module_that_is_not_there(module: str, tmp_path: Path) -> None:
    with pytest.raises(KvfsError, match=r"see .*log"):
        start("no_such_module_here", tmp_path, "ready")
    assert "no_such_module_here" in (tmp_path / "log").read_text()


def test_the_deadline(module: str, tmp_path: Path) -> None:
    begin_s = time.monotonic()
    with pytest.raises(Unavailable, match="did not serve within"):
        start(module, tmp_path, "hang", deadline_s=0.5)
    assert time.monotonic() - begin_s < 20
