"""The end of a mount's life: it comes, also when what it waits for does not."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pyfuse3
import pytest
import trio
from trio.testing import MockClock

from kvfs.config import MOUNT_STOP_DEADLINE_S, Config, DirectoryConfig
from mount import run


def test_a_notice_that_is_stuck_delays_the_end_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended_s: list[float] = []

    async def serve() -> None:
        requests_ended = trio.Event()

        async def answer_requests(**options: int) -> None:
            try:
                await trio.sleep_forever()
            finally:
                requests_ended.set()

        class Notices:
            async def run(self) -> None:
                with trio.CancelScope(shield=True):  # as a thread is that the kernel keeps
                    await requests_ended.wait()

        class Lingering:
            async def run(self) -> None:
                await trio.sleep_forever()

        async def signals() -> AsyncIterator[int]:
            yield signal.SIGTERM

        monkeypatch.setattr(pyfuse3, "main", answer_requests)
        monkeypatch.setattr(pyfuse3, "terminate", lambda: None)
        operations = SimpleNamespace(
            freshness=Notices(), lingering=Lingering(), is_ready=trio.Event()
        )
        config = Config((DirectoryConfig(Path("/store")),))
        with trio.fail_after(10 * MOUNT_STOP_DEADLINE_S):
            await run._serve_requests(
                operations,  # type: ignore[arg-type]  # only what this function uses
                config,
                Path("/mnt"),
                signals(),
                lambda: None,
            )
        ended_s.append(trio.current_time())

    trio.run(serve, clock=MockClock(autojump_threshold=0))
    assert ended_s == [pytest.approx(MOUNT_STOP_DEADLINE_S, abs=1)]
