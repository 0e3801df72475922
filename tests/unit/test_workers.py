"""Threads for work that may hang: in its order, surprises logged, and no process that cannot
end."""

import queue
import subprocess
import sys
import threading
from pathlib import Path

from kvfs.workers import Workers
from tests.processes import wait_until

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0
HANGS = """
import threading
from kvfs.workers import Workers
began = threading.Event()
workers = Workers("test", 2)
workers.start(lambda: (began.set(), threading.Event().wait()))
began.wait()
workers.close()
"""


def test_work_is_done_in_its_order_whatever_fails(allow_warnings: list[str]) -> None:
    allow_warnings.append("work on test failed in an unforeseen way")
    workers = Workers("test", 1)
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
    workers = Workers("test", 1)
    go_on, ended = threading.Event(), threading.Event()
    workers.start(go_on.wait, WAIT_S)
    workers.start(ended.set)
    workers.close()
    workers.close()
    assert not workers.start(ended.clear)
    go_on.set()
    assert ended.wait(WAIT_S)


def test_a_thread_is_made_for_work_that_no_idle_one_takes_up_to_the_most() -> None:
    workers = Workers("test", 1)
    go_on = threading.Event()
    began: queue.SimpleQueue[int] = queue.SimpleQueue()

    def hold(number: int) -> None:
        began.put(number)
        go_on.wait(WAIT_S)

    workers.start(hold, 0)
    assert began.get(timeout=WAIT_S) == 0
    workers.start(hold, 1)
    assert workers.count == 1
    workers.start(hold, 2, count_max=2)
    assert workers.count == 2 and began.get(timeout=WAIT_S) == 1
    workers.close()
    alone = threading.Event()
    workers.start_alone(alone.set)
    assert alone.wait(WAIT_S)
    go_on.set()
    assert began.get(timeout=WAIT_S) == 2
    wait_until(lambda: workers.count == 0)


def test_work_that_hangs_does_not_keep_its_process() -> None:
    subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, check=True, timeout=WAIT_S)
