"""Starting a process that says when it is ready, or why it is not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import daemon
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
elif orders["do"] == "fail and stay":
    tell_failure("because of this")
    time.sleep(60)
elif orders["do"] == "outlive":
    here = orders["here"]
    open(here + "/begun", "w").write(str(os.getpid()))
    while not os.path.exists(here + "/go"):
        time.sleep(0.01)
    tell_ready()
    open(here + "/served", "w").close()
    time.sleep(60)
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


def test_orders_may_be_larger_than_a_pipe(module: str, tmp_path: Path) -> None:
    orders = {"do": "fail", "more": bytes(2**21)}
    with pytest.raises(KvfsError, match=r"^because of this$"):
        start_in_background(module, orders, tmp_path / "log", 30)


@pytest.mark.parametrize("size_bytes", [1, 2**21])
def test_orders_that_nobody_takes(tmp_path: Path, module: str, size_bytes: int) -> None:
    (tmp_path / "takes_nothing.py").write_text("import time; time.sleep(60)")
    begin_s = time.monotonic()
    with pytest.raises(Unavailable, match="did not serve within"):
        start_in_background("takes_nothing", bytes(size_bytes), tmp_path / "log", 0.5)
    assert time.monotonic() - begin_s < 20


def test_large_orders_for_a_module_that_is_not_there(module: str, tmp_path: Path) -> None:
    with pytest.raises(KvfsError, match=r"see .*log"):
        start_in_background("no_such_module_here", bytes(2**21), tmp_path / "log", 30)


def test_one_that_says_why_not_and_stays_is_ended(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_LEAVE_DEADLINE_S", 0.5)
    begin_s = time.monotonic()
    with pytest.raises(KvfsError, match=r"^because of this$"):
        start(module, tmp_path, "fail and stay")
    assert time.monotonic() - begin_s < 20


def test_one_whose_starter_has_gone_serves_all_the_same(module: str, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kvfs.daemon import start_in_background;"
        "orders = {'do': 'outlive', 'here': sys.argv[1]};"
        "start_in_background('background_example', orders, Path(sys.argv[1], 'log'), 60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    begun = tmp_path / "begun"
    wait_until(lambda: begun.exists() and begun.read_text() != "", 30)
    pid = int(begun.read_text())
    try:
        starter.kill()
        starter.wait(10)
        (tmp_path / "go").touch()
        wait_until((tmp_path / "served").exists)
        assert "Error" not in (tmp_path / "log").read_text()
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    """Whatever was started has ended and was reaped."""
    before = _children()
    yield
    assert _children() <= before


def _children() -> set[str]:
    """Processes that this one started, ended but not reaped among them."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for file in lists for pid in file.read_text().split()}
