"""An eye on the event loop: which step of which task held it, for how long, and where.

All requests of a node share one thread, so a step that computes or blocks for long delays all of
them. With `KVFS_LOOP_LIMIT_MS=N` in the environment, a step above N ms is a warning in the log, and
so fails the test whose node it is. Nothing of this runs otherwise.

A busy machine makes any step long, so three times are told apart: the processor time of the step,
the time that the system kept the thread waiting for a processor (which counts for nothing), and the
rest, in which the step was blocked: by a disk, or by another thread that had the interpreter's
lock. `N,M` allows M ms of that, where N alone allows as much as of processor time.

Where a step was is found by looking at it now and then, from another thread. Code that keeps the
interpreter's lock can't be looked at; then the end of the step shows.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import trio

log = logging.getLogger(__name__)

LIMIT_VARIABLE = "KVFS_LOOP_LIMIT_MS"
_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(f"{_ROOT}/{package}/" for package in ("kvfs", "mount"))
_PLACES_MAX = 6  # of a stack, the innermost ones


@dataclass(frozen=True, slots=True)
class Held:
    """One step of a task that held the loop for too long."""

    task: str
    places: str  # where it was, from the outside in
    cpu_s: float
    blocked_s: float
    waited_s: float  # for a processor
    collected_s: float  # in Python's garbage collection, which is part of the processor time

    def __str__(self) -> str:
        times = (self.cpu_s, self.blocked_s, self.waited_s, self.collected_s)
        cpu, blocked, waited, collected = (f"{1000 * seconds:.1f}" for seconds in times)
        return (
            f"the event loop was held by {self.task}: {cpu} ms of processor time ({collected} of"
            f" them collecting garbage), {blocked} ms blocked, {waited} ms waiting for a processor;"
            f" in {self.places}"
        )


class LoopWatch(trio.abc.Instrument):
    """Reports each step that took more than `cpu_limit_s` or was blocked for `blocked_limit_s`, but
    for those of the task named `starter`: it starts and stops the others, and serves nobody."""

    def __init__(
        self,
        cpu_limit_s: float,
        blocked_limit_s: float,
        starter: str = "",
        report: Callable[[Held], None] = lambda held: log.warning("%s", held),
    ) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._blocked_limit_s = blocked_limit_s
        self._starter = starter
        self._report = report
        self._begin_s = 0.0  # 0: between steps
        self._cpu_s = 0.0
        self._waited_s = 0.0
        self._collected_s = 0.0
        self._collection_s = 0.0
        self._seen: Counter[str] = Counter()  # where the step was when it was looked at
        self._thread = 0
        self._schedule_fd = -1
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    # As trio calls it -----------------------------------------------------------------------------
    def before_run(self) -> None:
        self._thread = threading.get_ident()
        self._schedule_fd = _open_schedule()
        gc.callbacks.append(self._note_collection)
        self._sampler = threading.Thread(target=self._sample_always, daemon=True)
        self._sampler.start()

    def after_run(self) -> None:
        self._ended.set()
        if self._sampler is not None:
            self._sampler.join()
        gc.callbacks.remove(self._note_collection)
        if self._schedule_fd >= 0:
            os.close(self._schedule_fd)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._seen.clear()
        self._collected_s = 0.0
        self._waited_s = self._read_waited_s()
        self._cpu_s = time.thread_time()
        self._begin_s = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        wall_s = time.perf_counter() - self._begin_s
        self._begin_s = 0.0
        if wall_s <= min(self._cpu_limit_s, self._blocked_limit_s) or task.name == self._starter:
            return
        cpu_s = time.thread_time() - self._cpu_s
        waited_s = self._read_waited_s() - self._waited_s
        blocked_s = max(0.0, wall_s - cpu_s - waited_s)
        if cpu_s > self._cpu_limit_s or blocked_s > self._blocked_limit_s:
            seen = self._seen.most_common(1)
            places = seen[0][0] if seen else f"{_places_of_task(task)} (where it stopped)"
            self._report(Held(task.name, places, cpu_s, blocked_s, waited_s, self._collected_s))

    # Beside it ------------------------------------------------------------------------------------
    def _read_waited_s(self) -> float:
        if self._schedule_fd < 0:
            return 0.0
        return int(os.pread(self._schedule_fd, 100, 0).split()[1]) / 1e9

    def _note_collection(self, phase: str, info: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collection_s = time.perf_counter()
        else:
            self._collected_s += time.perf_counter() - self._collection_s

    def _sample_always(self) -> None:
        """Look where the loop is while a step takes long."""
        limit_s = min(self._cpu_limit_s, self._blocked_limit_s)
        while not self._ended.wait(limit_s / 5):
            begin_s = self._begin_s
            if begin_s and time.perf_counter() - begin_s > limit_s / 5:
                places = _places_of(sys._current_frames().get(self._thread))
                if self._begin_s == begin_s:
                    self._seen[places] += 1


def loop_watch(
    starter: Callable[..., object],
    environment: "os._Environ[str] | dict[str, str]" = os.environ,
) -> list[LoopWatch]:
    """The instruments of an event loop that begins with the function `starter`: a watch if the
    environment asks for one, else none."""
    limits = environment.get(LIMIT_VARIABLE, "")
    if not limits:
        return []
    cpu_ms, _, blocked_ms = limits.partition(",")
    name = f"{starter.__module__}.{starter.__qualname__}"  # as trio names a task
    return [LoopWatch(float(cpu_ms) / 1000, float(blocked_ms or cpu_ms) / 1000, name)]


def _open_schedule() -> int:
    """Where the kernel counts how long this thread waited for a processor; -1 if it doesn't."""
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _places_of(frame: FrameType | None) -> str:
    """Our part of a stack, from the outside in, and what it calls."""
    found: list[str] = []
    innermost = frame
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            found.append(_place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    if innermost is not None and not innermost.f_code.co_filename.startswith(_OURS):
        code = innermost.f_code
        found.insert(0, f"{Path(code.co_filename).name}:{innermost.f_lineno} {code.co_name}")
    return _join(list(reversed(found)))


def _places_of_task(task: trio.lowlevel.Task) -> str:
    stack = [
        _place(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in task.iter_await_frames()
        if frame.f_code.co_filename.startswith(_OURS)
    ]
    return _join(stack)


def _place(file: str, line: int | None, function: str) -> str:
    return f"{file.removeprefix(f'{_ROOT}/')}:{line} {function}"


def _join(places: Sequence[str]) -> str:
    return " > ".join(places[-_PLACES_MAX:]) or "no code of ours"
