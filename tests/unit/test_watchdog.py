"""The watch over the event loop: who is reported, and who is not."""

import time

import pytest
import trio

from kvfs.watchdog import LIMIT_VARIABLE, Held, LoopWatch, loop_watch


def watch(step: object, *, cpu_limit_s: float = 0.02, blocked_limit_s: float = 0.02) -> list[Held]:
    """What is reported of one task that does one thing. A busy machine may hold up any other."""
    found: list[Held] = []

    async def work() -> None:
        await trio.lowlevel.checkpoint()
        step()  # type: ignore[operator]
        await trio.lowlevel.checkpoint()

    async def main() -> None:
        compute()  # of no interest: it only starts the others
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, name="the culprit")

    watch = LoopWatch(cpu_limit_s, blocked_limit_s, f"{__name__}.{main.__qualname__}", found.append)
    trio.run(main, instruments=[watch])
    return [held for held in found if held.task == "the culprit"]


def compute() -> None:
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass


def block() -> None:
    time.sleep(0.05)


def test_a_step_that_computes() -> None:
    (held,) = watch(compute)
    assert held.cpu_s >= 0.05
    assert "the culprit: 5" in str(held)


def test_a_step_that_is_blocked() -> None:
    (held,) = watch(block)
    assert held.blocked_s > 0.03
    assert held.cpu_s < 0.02


def test_each_has_a_limit_of_its_own() -> None:
    assert watch(block, blocked_limit_s=60.0) == []
    assert watch(compute, cpu_limit_s=60.0, blocked_limit_s=60.0) == []


def test_short_steps_are_fine() -> None:
    assert watch(lambda: None, blocked_limit_s=5.0) == []


@pytest.mark.parametrize(
    ("text", "limits"), [(None, None), ("", None), ("10", (0.01, 0.01)), ("10,250", (0.01, 0.25))]
)
def test_it_is_there_when_asked_for(text: str | None, limits: tuple[float, float] | None) -> None:
    watches = loop_watch(block, {} if text is None else {LIMIT_VARIABLE: text})
    found = [(w._cpu_limit_s, w._blocked_limit_s) for w in watches]
    assert found == ([] if limits is None else [limits])
