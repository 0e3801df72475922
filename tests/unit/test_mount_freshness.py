"""What the kernel is told of changes: each once, never too many, from another thread."""

import threading
from collections.abc import Callable

import pytest
import trio

from kvfs.errors import NamespaceError
from kvfs.node import Change
from mount import freshness
from mount.freshness import Freshness


class Node:
    """As much of a node as telling changes takes: directories 1 > 10 > 20."""

    def __init__(self) -> None:
        self.meta = self
        self.callbacks: list[Callable[[Change], None]] = []

    def watch(self, callback: Callable[[Change], None]) -> None:
        self.callbacks.append(callback)

    def parent_of(self, ino: int) -> int:
        if ino == 99:
            raise NamespaceError(2)
        return {20: 10, 10: 1}[ino]


class Kernel:
    """Takes notices; `answer` may raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[tuple[int, bytes]] = []
        self.inodes: list[int] = []
        self.pages: list[int] = []
        self.threads: set[int] = set()
        self.error: OSError | None = None
        monkeypatch.setattr(freshness.pyfuse3, "invalidate_entry", self._entry)
        monkeypatch.setattr(freshness.pyfuse3, "invalidate_inode", self._inode)

    def _entry(self, parent: int, name: bytes) -> None:
        self.threads.add(threading.get_ident())
        self.names.append((parent, name))
        if self.error is not None:
            raise self.error

    def _inode(self, number: int, attr_only: bool) -> None:
        (self.inodes if attr_only else self.pages).append(number)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


def made() -> tuple[Freshness, Callable[[Change], None]]:
    node = Node()
    fresh = Freshness(node, lambda ino: ino + 1000)  # type: ignore[arg-type]  # as much as it takes
    return fresh, node.callbacks[0]


async def send(fresh: Freshness) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fresh.run)
        while fresh.is_waiting:
            await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


async def test_a_change_expires_its_name_and_what_is_above(kernel: Kernel) -> None:
    fresh, note = made()
    note(Change(20, b"a", 5))
    await send(fresh)
    assert kernel.names == [(20, b"a")]
    assert kernel.inodes == [1005, 20, 10, 1]
    assert threading.get_ident() not in kernel.threads


async def test_repetitions_fall_together(kernel: Kernel) -> None:
    fresh, note = made()
    for _ in range(1000):
        note(Change(20, b"a", 5))
        note(Change(20, b"b", 6))
    await send(fresh)
    assert kernel.names == [(20, b"a"), (20, b"b")]
    assert sorted(kernel.inodes) == [1, 10, 20, 1005, 1006]


async def test_pages_are_dropped_with_attributes_and_stay_to_be_dropped(kernel: Kernel) -> None:
    fresh, _ = made()
    fresh.expire_pages(7)
    fresh.expire_attributes(7)
    fresh.expire_attributes(8)
    await send(fresh)
    assert (kernel.pages, kernel.inodes) == ([7], [8])


async def test_a_directory_that_has_gone(kernel: Kernel) -> None:
    fresh, note = made()
    note(Change(99, b"a", 5))
    await send(fresh)
    assert kernel.names == [(99, b"a")]


async def test_what_the_kernel_does_not_know_is_fine(kernel: Kernel) -> None:
    fresh, note = made()
    kernel.error = FileNotFoundError(2, "no such entry")
    note(Change(20, b"a", 5))
    await send(fresh)
    assert kernel.names == [(20, b"a")]


async def test_too_many_changes_drop_the_oldest_and_say_so_once(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, allow_warnings: list[str]
) -> None:
    allow_warnings.append("more changes than can be told")
    monkeypatch.setattr(freshness, "STALE_NAMES_MAX", 3)
    fresh, note = made()
    for number in range(5):
        note(Change(20, b"%d" % number, number))
    assert fresh.dropped == 2
    await send(fresh)
    assert kernel.names == [(20, b"2"), (20, b"3"), (20, b"4")]
