"""Where files are, on its way from a node to a client: as it was sent, or refused in words."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.config import TIERS_MAX
from kvfs.errors import InvalidInput
from kvfs.located import (
    DIRECTORIES_TOLD_MAX,
    NOWHERE,
    Located,
    LocatedFile,
    pack_file,
    pack_tier,
    unpack_located,
    unpack_sizes,
    unpack_tickets,
    unpack_tiers,
)
from kvfs.settings.words import TIER_LIMITS, TierConfig, TierKind

DIGEST = b"d" * 16
FIRST, SECOND = b"1" * 16, b"2" * 16
SHARED = TierConfig("s", TierKind.SHARED, TIER_LIMITS[TierKind.SHARED], path=Path("/s"))
BUCKET = TierConfig("b", TierKind.OBJECT, TIER_LIMITS[TierKind.OBJECT], url="s3://b", region="r")


@pytest.fixture
def fd() -> Iterator[int]:
    opened = os.memfd_create("here")
    yield opened
    os.close(opened)


def test_files_come_as_they_were_told(fd: int) -> None:
    files = [
        LocatedFile(5, DIGEST, fd, 1, (0, 2), ()),
        None,
        LocatedFile(7, DIGEST, None, NOWHERE, (), (SECOND, FIRST), "10.0.0.1:7", b"ticket"),
        LocatedFile(7, DIGEST, None, NOWHERE, (1,), (FIRST,)),
    ]
    nodes: dict[bytes, int] = {}
    packed = [None if file is None else pack_file(file, nodes) for file in files]
    assert unpack_located([3, list(nodes), packed], [fd], len(files)) == Located(3, files)


HERE = [5, DIGEST, 0, [], [], "", b""]
THERE = [5, DIGEST, NOWHERE, [], [0], "a:1", b"t"]


@pytest.mark.parametrize(
    ("answer", "descriptors"),
    [
        (None, 0),
        ([1, []], 0),
        ([b"1", [], [None]], 0),
        ([1, [], []], 0),  # of one file that was asked for
        ([1, [], [None, None]], 0),
        ([1, [], [HERE]], 0),  # without its descriptor
        ([1, [], [None]], 1),  # with one that is nobody's
        ([1, [], [HERE[:-1]]], 1),
        ([1, [], [[*HERE[:3], [TIERS_MAX], *HERE[4:]]]], 1),
        ([1, [], [[*HERE[:3], [-1], *HERE[4:]]]], 1),
        ([1, [], [[*HERE[:3], ["s"], *HERE[4:]]]], 1),
        ([1, [], [[*HERE[:3], [True], *HERE[4:]]]], 1),
        ([1, [], [[*HERE[:2], DIRECTORIES_TOLD_MAX, *HERE[3:]]]], 1),
        ([1, [], [[*HERE[:2], -2, *HERE[3:]]]], 1),
        ([1, [], [THERE]], 0),  # at a node of which nothing is said
        ([1, ["node"], [THERE]], 0),
        ([1, [FIRST], [[*THERE[:5], 7, b"t"]]], 0),
    ],
)
def test_an_answer_about_files_that_is_none_is_refused(
    fd: int, answer: Any, descriptors: int
) -> None:
    with pytest.raises(InvalidInput, match="locate"):
        unpack_located(answer, [fd] * descriptors, 1)
    os.fstat(fd)  # it stayed the caller's


def test_tiers_come_as_they_were_told() -> None:
    told = unpack_tiers([9, [pack_tier(0, BUCKET), pack_tier(5, SHARED)]])
    assert told.revision == 9
    assert told.tiers == {0: BUCKET, 5: SHARED}


TOLD = pack_tier(0, SHARED)


@pytest.mark.parametrize(
    "item",
    [
        None,
        TOLD[:-1],
        [TIERS_MAX, *TOLD[1:]],
        [*TOLD[:2], "tape", *TOLD[3:]],
        [*TOLD[:3], "", *TOLD[4:]],  # neither path nor URL
        [*TOLD[:4], "s3://b", *TOLD[5:]],  # both
        [*TOLD[:-1], [1, 1, 1.0]],
        [*TOLD[:-1], [1.5, 1, 1.0, 1.0, 0.0, 0.0]],
    ],
)
def test_an_answer_about_tiers_that_is_none_is_refused(item: Any) -> None:
    with pytest.raises(InvalidInput, match="tiers"):
        unpack_tiers([9, [item]])


@pytest.mark.parametrize("answer", [None, ["a:1"], ["a:1", []], ["a:1", ["t"]], [b"a", [b"t"]]])
def test_an_answer_about_tickets_that_is_none_is_refused(answer: Any) -> None:
    assert unpack_tickets(["a:1", [b"t", None]], 2) == ("a:1", [b"t", None])
    with pytest.raises(InvalidInput, match="peer_tickets"):
        unpack_tickets(answer, 1)


@pytest.mark.parametrize("answer", [None, [], [1, 2], [b"1"], [True]])
def test_an_answer_about_sizes_that_is_none_is_refused(answer: Any) -> None:
    assert unpack_sizes([5, None], 2) == [5, None]
    with pytest.raises(InvalidInput, match="peer_sizes"):
        unpack_sizes(answer, 1)
