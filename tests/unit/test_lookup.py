"""Look-ups behind the scheduler's back, and what a node that goes away costs them."""

import threading
from collections.abc import Callable, Iterator

import pytest

from gpu_bridge.counters import Counters
from gpu_bridge.link import Link
from gpu_bridge.lookup import LookupService
from gpu_bridge.plan import Geometry, Group, Place, chunk_keys
from kvfs.config import PAGE_BYTES
from tests.memory_node import MemoryNode
from tests.processes import wait_until

GEOMETRY = Geometry(256, 128, (Group(0, 128),), shards=2)
PLACE = Place(b"kv/m@" + b"0" * 32, "m", "0" * 32)
HASHES = [bytes([i]) * 32 for i in range(1, 4)]
WAIT_S = 30.0
Start = Callable[[], LookupService]


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


@pytest.fixture
def start(node: MemoryNode, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the service over a real link whose client is the node in memory."""
    monkeypatch.setattr("gpu_bridge.lookup.BRIDGE_PROBE_INTERVAL_S", 0.01)
    services: list[LookupService] = []

    def start() -> LookupService:
        link = Link(tmp_path, deadline_s=1, start=False)
        link.client = node
        services.append(LookupService(link, GEOMETRY, Counters(), WAIT_S))
        return services[-1]

    yield start
    for service in services:
        service.close(WAIT_S)


def fill(node: MemoryNode) -> None:
    """The first chunk whole, of the second one shard, and a file too short in the third's place."""
    names = chunk_keys(GEOMETRY, HASHES).file_names()
    paths = [b"%b/%b/%b" % (PLACE.namespace, name[:2], name) for name in names]
    for path in paths[:3]:
        node.put(path, bytes(2 * PAGE_BYTES))
    for path in paths[4:]:
        node.put(path, b"")


def test_only_chunks_whose_shards_are_all_there_are_found(node: MemoryNode, start: Start) -> None:
    fill(node)
    lookup = start().start(PLACE, HASHES)
    assert lookup.answer(WAIT_S) == [(True,), (False,), (False,)]
    assert node.calls.count("lookup") == 2  # the first was to connect


def test_nothing_is_asked_about_a_short_prompt(start: Start) -> None:
    assert start().start(PLACE, []).answer(0) == ()


def test_while_the_node_does_not_answer_there_is_no_answer_and_no_wait(
    node: MemoryNode, start: Start
) -> None:
    held = threading.Event()
    node.before = lambda name: held.wait(WAIT_S) and None
    lookup = start().start(PLACE, HASHES)
    assert lookup.answer(0.001) is None
    held.set()
    assert lookup.answer(WAIT_S) is not None


def test_a_node_that_is_away_is_a_miss_at_once_until_it_is_back(
    node: MemoryNode, start: Start, allow_warnings: list[str]
) -> None:
    allow_warnings += ["working without cache until its node answers", "answers again"]
    fill(node)
    node.is_away = True
    service = start()
    assert service.start(PLACE, HASHES).answer(WAIT_S) == ()
    node.before = lambda name: None
    assert service.start(PLACE, HASHES).answer(0) == ()  # without asking
    node.is_away = False
    wait_until(lambda: service.start(PLACE, HASHES).answer(WAIT_S) == [(True,), (False,), (False,)])
