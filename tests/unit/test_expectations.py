"""What the node is told of requests that wait, and what it is spared."""

from collections.abc import Iterator, Sequence

import pytest

from gpu_bridge.expectations import Expectations, Waiting
from gpu_bridge.plan import Geometry, Group, Place, chunk_keys
from kvfs.config import BRIDGE_EXPECTED_CHUNKS_MAX
from kvfs.errors import Unavailable
from tests.processes import wait_until

GEOMETRY = Geometry(256, 256, (Group(0, 256),), shards=2)
PLACE = Place(b"kv/m@" + b"0" * 32, "m", "0" * 32)
HASHES = [number.to_bytes(32, "big") for number in range(1, BRIDGE_EXPECTED_CHUNKS_MAX + 9)]


class Hearer:
    """A client that is told. `answers`: what it says, one after the other, the last for ever."""

    def __init__(self) -> None:
        self.told: list[list[bytes]] = []
        self.answers: list[bool | Unavailable] = [True]

    def expect(self, paths: Sequence[bytes]) -> bool:
        self.told.append(list(paths))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    def close(self) -> None:
        pass


@pytest.fixture
def hearer() -> Hearer:
    return Hearer()


@pytest.fixture
def expectations(hearer: Hearer) -> Iterator[Expectations]:
    made = Expectations(hearer, GEOMETRY)  # type: ignore[arg-type]
    yield made
    made.close()


def paths_of(hashes: Sequence[bytes]) -> list[bytes]:
    names = chunk_keys(GEOMETRY, hashes).file_names()
    return [b"%b/%b/%b" % (PLACE.namespace, name[:2], name) for name in names]


def test_a_request_that_waits_is_told_of_in_the_order_of_its_chunks(
    expectations: Expectations, hearer: Hearer
) -> None:
    expectations.expect(Waiting(), PLACE, HASHES[:3])
    wait_until(lambda: hearer.told == [paths_of(HASHES[:3])])


def test_what_is_loaded_meanwhile_or_was_not_found_is_no_word_worth(
    expectations: Expectations, hearer: Hearer
) -> None:
    over = Waiting()
    expectations.expect(over, PLACE, HASHES[:1])
    over.end()
    expectations.expect(Waiting(), PLACE, [])
    expectations.expect(Waiting(), PLACE, HASHES)
    wait_until(lambda: len(hearer.told) == 1)
    assert hearer.told == [paths_of(HASHES[:BRIDGE_EXPECTED_CHUNKS_MAX])]


@pytest.mark.parametrize("answer", [False, Unavailable("away")])
def test_a_node_that_does_nothing_about_it_is_left_alone(
    expectations: Expectations,
    hearer: Hearer,
    monkeypatch: pytest.MonkeyPatch,
    answer: bool | Unavailable,
) -> None:
    hearer.answers = [answer, True]
    for hashes in (HASHES[:1], HASHES[1:2]):
        expectations.expect(Waiting(), PLACE, hashes)
    wait_until(lambda: expectations._deaf_until_s > 0)
    expectations.expect(Waiting(), PLACE, HASHES[2:3])
    expectations._deaf_until_s = 0.0  # it is asked again after a while
    expectations.expect(Waiting(), PLACE, HASHES[3:4])
    wait_until(lambda: paths_of(HASHES[3:4]) in hearer.told)
    assert paths_of(HASHES[:1]) in hearer.told and paths_of(HASHES[2:3]) not in hearer.told
