"""A trace is read line by line or refused by its line; what of it is cached; what a replay says."""

import io
import json

import pytest

from kvfs.errors import InvalidInput
from kvfs.replay.plan import BlockCache, plan
from kvfs.replay.report import Loads, load_times, report_of
from kvfs.replay.simulated import TierSpeed, parse_speeds, simulate
from kvfs.replay.trace import Request, lines_of, read_trace

MIB = 1024 * 1024


def line(at_ms: float, *blocks: int) -> bytes:
    return json.dumps(
        {
            "timestamp": at_ms,
            "input_length": 512 * len(blocks),
            "output_length": 1,
            "hash_ids": blocks,
        }
    ).encode()


def requests(*items: tuple[float, list[int]]) -> list[Request]:
    return [Request(at_s, tuple(blocks), 512 * len(blocks), 1) for at_s, blocks in items]


def test_times_count_from_the_first_request_and_empty_lines_are_none() -> None:
    found = list(read_trace("t", [line(1500, 1, 2), b"\n", line(1500, 3), line(4000.5)]))
    assert [request.at_s for request in found] == [0.0, 0.0, 2.5005]
    assert [request.blocks for request in found] == [(1, 2), (3,), ()]
    assert found[0].input_tokens == 1024


def test_a_limit_reads_no_further() -> None:
    assert len(list(read_trace("t", [line(0, 1), line(1, 2), b"{nonsense"], limit=2))) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (b"{", "is no JSON"),
        (b"[1]", "is no JSON object"),
        (b"\xff", "is no UTF-8 (byte 0xff at 0); write the trace as UTF-8"),
        (line(1, 2).replace(b"hash", b"h\xc3("), "is no UTF-8 (byte 0xc3 at "),
        (b"[" * 100_000, "is no JSON"),
        (line(1, 2).replace(b"timestamp", b"time"), "has no timestamp"),
        (line(-1, 2), "timestamp -1 is no time"),
        (line(1, 2).replace(b"1,", b"NaN,", 1), "timestamp nan is no time"),
        (line(1, 2).replace(b"1,", b"true,", 1), "timestamp True is no time"),
        (line(1, 2).replace(b"512", b"5.5"), "input_length 5.5 is no number of tokens"),
        (line(1, 2).replace(b"[2]", b'["2"]'), "hash_ids ['2'] is no list of numbers"),
        (line(1, 2).replace(b"[2]", b"[-2]"), "hash_ids [-2] is no list of numbers"),
        (line(1, 2).replace(b"[2]", b"{}"), "hash_ids {} is no list of numbers"),
        (line(1, *range(70_000)), "hash_ids are 70,000; 65,536 are allowed"),
        (line(0.5, 2), "timestamp 0.5 is before the 1 of the line above"),
        (b" " * 3 * MIB + b"1", "is longer than"),
        (b" " * 3 * MIB, "is longer than"),
    ],
)
def test_a_line_that_is_no_request_is_named(wrong: bytes, said: str) -> None:
    with pytest.raises(InvalidInput, match=r"^t, line 3: ") as refused:
        list(read_trace("t", [line(0, 1), line(1, 1), wrong]))
    assert said in refused.value.reason


def test_of_a_line_that_never_ends_no_more_is_read_than_shows_it() -> None:
    said = r"^t, line 1: is longer than 2,097,152 bytes"
    with open("/dev/zero", "rb") as zeros, pytest.raises(InvalidInput, match=said):
        list(read_trace("t", lines_of(zeros)))
    lines = [line(1500, 1, 2) + b"\n", b"\n", b"\xef\xbb\xbf" + line(4000.5)]  # with a BOM
    found = list(read_trace("t", lines_of(io.BytesIO(b"".join(lines)))))
    assert [request.at_s for request in found] == [0.0, 2.5005]


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(InvalidInput, match="has no requests"):
        list(read_trace("t", [b"\n"]))


def test_a_hit_is_a_prefix_and_says_which_tiers_have_it() -> None:
    trace = requests((0, [1, 2, 3]), (1, [1, 2, 9]), (2, [2, 3]), (3, [7, 1]))
    planned = list(plan(trace, [2, None]))
    assert planned[0].hits == ()
    assert planned[1].hits == ((1, (0, 1)), (2, (0, 1)))  # 3 went first from the small tier
    assert planned[2].hits == ((2, (0, 1)), (3, (1,)))
    assert planned[3].hits == ()  # 1 is cached, but not what comes before it


def test_the_least_recently_used_block_goes() -> None:
    cache = BlockCache(2)
    for block in (1, 2, 1, 3):
        cache.use(block)
    assert [block in cache for block in (1, 2, 3)] == [True, False, True]
    nothing = BlockCache(0)
    nothing.use(1)
    assert 1 not in nothing


def test_a_simulation_reads_from_all_tiers_and_does_the_same_again() -> None:
    trace = requests((0, list(range(64))), (1, list(range(64))), (2, [500]))
    planned = list(plan(trace, [None, None]))
    tiers = [TierSpeed("fast", 1e9), TierSpeed("slow", 0.5e9)]
    loaded: list[int] = []
    loads = simulate(planned, tiers, MIB, on_loaded=loaded.append)
    assert loads == simulate(planned, tiers, MIB)
    assert loaded == [64]
    assert loads.lost_blocks == 0
    assert len(loads.took_s) == 1
    alone_s = 64 * MIB / 1e9
    assert alone_s / 1.5 < loads.took_s[0] < alone_s
    assert sum(tier.read_bytes for tier in loads.tiers) == 64 * MIB
    assert loads.tiers[0].read_bytes > loads.tiers[1].read_bytes > 0


def test_faster_requests_wait_for_each_other() -> None:
    items = [(float(number), list(range(32))) for number in range(20)]
    planned = list(plan(requests(*items), [None]))
    slow = [TierSpeed("only", 100e6)]
    calm = load_times(simulate(planned, slow, MIB).took_s)
    hurried = load_times(simulate(planned, slow, MIB, speed=100).took_s)
    assert calm["max"] is not None and hurried["mean"] is not None
    assert hurried["mean"] > 2 * calm["max"]


def test_more_requests_than_the_schedule_has_room_for_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.config.SCHEDULE_JOBS_MAX", 4)
    planned = list(plan(requests(*[(0.0, [1, 2])] * 50), [None]))
    loads = simulate(planned, [TierSpeed("only", 1e9)], MIB)
    assert len(loads.took_s) == 49
    assert loads.lost_blocks == 0


def test_nothing_hit_is_no_time() -> None:
    planned = list(plan(requests((0, [1])), [None]))
    document = report_of(planned, MIB, simulate(planned, [TierSpeed("a", 1e9)], MIB)).document()
    assert document["hit_ratio"] == 0.0
    assert document["load_s"] == {"mean": None, "p50": None, "p99": None, "max": None}


def test_a_report_counts() -> None:
    planned = list(plan(requests((0, [1, 2]), (0, [1, 3])), [None]))
    document = report_of(planned, 10, Loads((1.0, 3.0), 4.0, 0, ())).document()
    assert document["hit_blocks"] == 1
    assert document["hit_ratio"] == 0.25
    assert document["hit_bytes"] == 10
    assert document["load_s"]["mean"] == 2.0


@pytest.mark.parametrize(
    "words",
    [["nvme"], ["nvme:"], ["nvme:0"], ["nvme:-1"], ["nvme:1:-1"], ["nvme:1:2:3"], ["nvme:inf"],
     ["nvme:nan"], [":1"], ["a b:1"], ["a:1", "a:2"], [f"t{n}:1" for n in range(65)]],
)  # fmt: skip
def test_words_that_are_no_tier_are_refused(words: list[str]) -> None:
    with pytest.raises(InvalidInput):
        parse_speeds(words)


def test_a_tier_has_a_speed_and_a_latency() -> None:
    assert parse_speeds(["nvme:6:0.1", "peer:2.5"]) == [
        TierSpeed("nvme", 6e9, 0.0001),
        TierSpeed("peer", 2.5e9, 0.001),
    ]
