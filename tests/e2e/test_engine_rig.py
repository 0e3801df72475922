"""What benchmarks start ends with them, and has the time to clean up."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.engine_rig import Server, is_group_running

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
BINARIES = Path(sys.executable).parent

# Its child is what a resource tracker is: it outlives its parent, and then does something.
PARENT_OF_A_TRACKER = """
import os, signal, sys, time
kept, given = os.pipe()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(given)
    os.read(kept, 1)
    time.sleep(0.2)
    open(sys.argv[2], "w").close()
    os._exit(0)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} does not come"
        time.sleep(0.01)


def test_what_a_server_leaves_may_clean_up(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    command = ["python", "-c", PARENT_OF_A_TRACKER, str(begun), str(ended)]
    with Server("a server", command, 0, tmp_path / "log", binaries=BINARIES) as server:
        wait_for(begun)
        pool = Path(f"/dev/shm/lmcache_l1_pool_{server.pid}")
        pool.touch()
    assert ended.exists()
    assert not pool.exists()
    assert not is_group_running(server.pid)


def test_a_server_ends_when_its_parent_was_killed(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from scripts.engine_rig import Server
command = ["python", "-c", "import time; print('runs', flush=True); time.sleep(60)"]
server = Server("a server", command, 0, Path(sys.argv[1]), binaries=Path(sys.executable).parent)
while "runs" not in server.log.read_text():
    time.sleep(0.01)
print(server.pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", program, tmp_path / "log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert is_group_running(group)
        parent.kill()
    end_s = time.monotonic() + DEADLINE_S
    while is_group_running(group):
        assert time.monotonic() < end_s, "the server outlives its parent"
        time.sleep(0.01)


def test_a_second_sigterm_does_not_disturb_what_the_first_began() -> None:
    program = """
import sys
from scripts.ending import clean_up_on_sigterm
clean_up_on_sigterm()
try:
    print("works", flush=True)
    sys.stdin.readline()
finally:
    print("cleans up", flush=True)
    sys.stdin.readline()
    print("has", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "works\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "cleans up\n"
        process.send_signal(signal.SIGTERM)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "has\n"
    assert process.returncode == 143
