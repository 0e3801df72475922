"""The end of a mount's life: it comes, also when what it waits for does not."""

import errno
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pyfuse3
import pytest
import trio
from trio.testing import MockClock

from kvfs.config import MOUNT_STOP_DEADLINE_S
from kvfs.errors import KvfsError, OutOfSpace, Unavailable
from kvfs.settings.words import Config, DirectoryConfig
from mount import run


def test_a_notice_that_is_stuck_delays_the_end_no_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("are given up")
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
            freshness=Notices(),
            lingering=Lingering(),
            files=SimpleNamespace(
                run=trio.sleep_forever,
                settling=SimpleNamespace(settle_all=trio.lowlevel.checkpoint),
            ),
            is_ready=trio.Event(),
            stop_waiting=lambda: None,
        )
        config = Config((DirectoryConfig(Path("/store")),))
        with trio.fail_after(10 * MOUNT_STOP_DEADLINE_S):
            await run._serve_requests(
                operations,  # type: ignore[arg-type]  # only what this function uses
                config,
                Path("/mnt"),
                None,
                signals(),
                lambda: None,
            )
        ended_s.append(trio.current_time())

    trio.run(serve, clock=MockClock(autojump_threshold=0))
    assert ended_s == [pytest.approx(MOUNT_STOP_DEADLINE_S, abs=1)]


async def test_a_failing_end_takes_the_mount_down_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(pyfuse3, "init", lambda *arguments: None)

    def close(*, unmount: bool) -> None:
        closed.append(unmount)

    monkeypatch.setattr(pyfuse3, "close", close)

    def refuse() -> None:
        raise OutOfSpace("full")

    operations = SimpleNamespace(
        files=SimpleNamespace(close=refuse), lingering=SimpleNamespace(drop_all=refuse)
    )
    config = Config((DirectoryConfig(tmp_path),))
    with pytest.raises(OutOfSpace):
        async with run._mounted(operations, config, tmp_path):  # type: ignore[arg-type]  # as above
            pass
    assert closed == [True]


async def test_only_a_store_that_another_owns_is_explained_as_such(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def broken(config: Config) -> AsyncIterator[None]:
        raise Unavailable("the metadata cannot be opened")
        yield

    monkeypatch.setattr(run, "running", broken)
    with pytest.raises(Unavailable, match=r"^the metadata cannot be opened$"):
        await run.serve_mount(Config((DirectoryConfig(tmp_path),)), tmp_path)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "Permission denied; mount as root, or let this user open it"),
        (errno.EPERM, "give the container the device"),
        (errno.ENOENT, "load the module fuse"),
    ],
)
def test_a_device_that_cannot_be_opened_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Unavailable, match=f"^/dev/fuse: .*{advice}"):
        run._check_device()


async def test_who_lacks_fusermount_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*words: object) -> None:
        raise RuntimeError("fuse_session_mount failed")

    monkeypatch.setattr(pyfuse3, "init", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KvfsError, match="needs fusermount3: install fuse3"):
        async with run._mounted(None, Config((DirectoryConfig(tmp_path),)), tmp_path):  # type: ignore[arg-type]  # not reached
            pass
