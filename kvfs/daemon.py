"""Starting a process that outlives us, and hearing from it when it serves.

A fresh interpreter is started, never a fork: threads and an event loop do not survive one. The new
process gets its orders on standard input, its log as standard output and error, and a pipe on which
it says that it is ready, or why it cannot be. Whoever starts it waits for that.
"""

import contextlib
import fcntl
import gc
import logging
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from kvfs.config import LOG_BYTES_MAX
from kvfs.errors import KvfsError, Unavailable
from kvfs.supervisor import JournalFormatter, is_in_journal

READY_FD = 3
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_READY = b"ready\n"
_ANSWER_BYTES_MAX = 4096
_NOTE_BYTES_MAX = 3072
_LEAVE_DEADLINE_S = 10.0  # for one that said why it cannot serve
_KILL_DEADLINE_S = 5.0


def start_in_background(
    module: str,
    orders: Any,
    log: Path,
    deadline_s: float,
    on_note: Callable[[str], object] = lambda note: None,
) -> int:
    """Run `python -m module` as a daemon and return its process id when it is ready.

    `orders` is anything that pickles; the module takes it with `take_orders`. `on_note` is called
    with what the process has to say although it is ready. Raises `KvfsError` with what it said when
    it is not, or `Unavailable` at the deadline, when it is ended.
    """
    end_s = time.monotonic() + deadline_s
    log_fd = _lift(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    orders_read, orders_write = map(_lift, os.pipe())
    ready_read, ready_write = map(_lift, os.pipe())
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", module],
            child_environment(),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, orders_read, 0),
                (os.POSIX_SPAWN_DUP2, log_fd, 1),
                (os.POSIX_SPAWN_DUP2, log_fd, 2),
                (os.POSIX_SPAWN_DUP2, ready_write, READY_FD),
            ],
        )
        os.close(ready_write)
        ready_write = -1
        os.close(orders_read)
        orders_read = -1
        try:
            _send_orders(orders_write, pickle.dumps(orders), end_s)
            os.close(orders_write)
            orders_write = -1
            note = _wait_ready(ready_read, log, end_s)
        except TimeoutError as error:
            _end(pid)
            raise Unavailable(f"it did not serve within {deadline_s:.0f} s; see {log}") from error
        except BaseException:
            _wait_end(pid)
            raise
        if note:
            on_note(note)
        return pid
    finally:
        for fd in (log_fd, orders_read, orders_write, ready_read, ready_write):
            if fd >= 0:
                os.close(fd)


def child_environment() -> dict[str, str]:
    """Ours, with the place that this package was imported from: it may be nowhere on the path."""
    home = os.fspath(Path(__file__).resolve().parent.parent)
    rest = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{rest}" if rest else home}


def _lift(fd: int) -> int:
    """The same descriptor above the numbers that the new process gets."""
    lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return lifted


def _send_orders(fd: int, data: bytes, end_s: float) -> None:
    """Write all, though the pipe holds less. Raises TimeoutError. A reader that has gone is for
    `_wait_ready` to tell: it may have said why."""
    os.set_blocking(fd, False)
    rest = memoryview(data)
    while rest:
        if not select.select([], [fd], [], max(0.0, end_s - time.monotonic()))[1]:
            raise TimeoutError
        try:
            rest = rest[os.write(fd, rest[: select.PIPE_BUF]) :]
        except BrokenPipeError:
            return


def _wait_ready(ready: int, log: Path, end_s: float) -> str:
    """What the process has to say when it serves, mostly nothing. Raises `KvfsError` when it says
    why it does not or goes, and TimeoutError."""
    answer = b""
    while len(answer) < _ANSWER_BYTES_MAX:
        if not select.select([ready], [], [], max(0.0, end_s - time.monotonic()))[0]:
            raise TimeoutError
        data = os.read(ready, _ANSWER_BYTES_MAX)
        answer += data
        if answer == _READY or answer.endswith(b"\n" + _READY):
            return answer.removesuffix(_READY).decode("utf-8", "replace").strip()
        if not data:
            break
    text = answer.decode("utf-8", "replace").strip()
    raise KvfsError(text or f"the background process ended before it served; see {log}")


def _wait_end(pid: int) -> None:
    """Reap a process that is about to go; one that does not is ended."""
    gone = os.pidfd_open(pid)
    try:
        if select.select([gone], [], [], _LEAVE_DEADLINE_S)[0]:
            os.waitpid(pid, 0)
        else:
            _end(pid)
    finally:
        os.close(gone)


def _end(pid: int) -> None:
    """Kill and reap; one that the kernel does not let go is left to whoever reaps us."""
    os.kill(pid, signal.SIGKILL)
    gone = os.pidfd_open(pid)
    try:
        select.select([gone], [], [], _KILL_DEADLINE_S)
        os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(gone)


# In the new process -------------------------------------------------------------------------------
def log_to(log: Path | None, *, echo: bool) -> None:
    """Log to a file of bounded size and, with `echo`, to standard error, as its reader likes it."""
    handlers: list[logging.Handler] = [logging.StreamHandler()] if echo else []
    if echo and is_in_journal():
        handlers[0].setFormatter(JournalFormatter())
    if log is not None:
        handlers.append(
            RotatingFileHandler(
                log, maxBytes=LOG_BYTES_MAX, backupCount=1, errors="surrogateescape"
            )
        )
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=handlers)


def ending_signals() -> list[signal.Signals]:
    """What ends a node in good order: the end of its terminal as well, unless that is ignored, as
    nohup has it."""
    ends = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    return ends


def settle_memory() -> None:
    """Keep all that is loaded out of Python's garbage collections from now on: it stays anyway, and
    looking through it holds an event loop for tens of milliseconds."""
    gc.collect()
    gc.freeze()


def take_orders() -> Any:
    """What `start_in_background` was given. Only its own child calls this, on its own pipe, before
    it opens anything: whatever else it has inherited is closed."""
    os.closerange(READY_FD + 1, os.sysconf("SC_OPEN_MAX"))
    orders = pickle.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir("/")
    os.set_inheritable(READY_FD, False)
    return orders


def tell_ready(note: str = "") -> None:
    """Let whoever waits for us go on, with a note of one line for a person, and leave its session
    and terminal. Not before: while a mount on demand is made, the kernel lets only the process
    group that makes it see the place."""
    os.setsid()
    said = note.encode("utf-8", "backslashreplace")[:_NOTE_BYTES_MAX]
    _answer(said + b"\n" + _READY if said else _READY)


def tell_failure(message: str) -> None:
    """Say in one line why we cannot serve."""
    _answer(message.strip().encode("utf-8", "backslashreplace")[:_ANSWER_BYTES_MAX])


def _answer(data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # who waited for us has gone; we go on
        os.write(READY_FD, data)
    os.close(READY_FD)
