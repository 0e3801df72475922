"""The scheduler's side, told what vLLM tells it: hits, saves, fences, failures."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_bridge.counters import Counters
from gpu_bridge.lookup import Answer, Lookup
from gpu_bridge.plan import Geometry, Group, Place, StepPlan
from gpu_bridge.reports import WorkerReport
from gpu_bridge.settings import BridgeSettings
from gpu_bridge.vllm_scheduler import SchedulerSide

GEOMETRY = Geometry(256, 128, (Group(0, 128),), shards=2)
PLACE = Place(b"kv/m@" + b"0" * 32, "m", "0" * 32)


class Lookups:
    """Answers what the test says; `stored` None: not yet."""

    def __init__(self) -> None:
        self.stored: set[bytes] | None = set()
        self.asked = 0
        self.waiting: list[Lookup] = []

    def start(self, place: Place, hashes: list[bytes]) -> Lookup:
        self.asked += 1
        lookup = Lookup(place, hashes, 30)
        self.waiting.append(lookup)
        self.answer()
        return lookup

    def answer(self) -> None:
        if self.stored is None:
            return
        for lookup in self.waiting:
            answer: Answer = [(chunk in self.stored,) for chunk in lookup.hashes]
            lookup.finish(answer)
        self.waiting.clear()

    def close(self, deadline_s: float) -> None:
        pass


@dataclass
class Request:
    """What the connector reads of vLLM's Request."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    prompt_embeds: Any = None
    resumable: bool = False
    prompt_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_token_ids = list(self.all_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return [
            self.all_token_ids[0].to_bytes(16, "big") + (i + 1).to_bytes(16, "big")
            for i in range(self.num_tokens // 128)
        ]

    def chunk(self, index: int) -> bytes:
        return self.block_hashes[2 * index + 1]


def make(**changes: Any) -> tuple[SchedulerSide, Lookups, Counters]:
    lookups, counters = Lookups(), Counters()
    options: dict[str, Any] = {"can_load": True, "can_save": True, "shares_blocks": True}
    side = SchedulerSide(
        BridgeSettings(Path("/s")), GEOMETRY, lookups, counters, **(options | changes)
    )
    side.place = PLACE
    return side, lookups, counters


def request(name: str, tokens: int, first: int = 1) -> Request:
    return Request(name, [first, *range(2, tokens + 1)])


def step(
    side: SchedulerSide,
    tables: dict[str, list[int]] | None = None,
    scheduled: dict[str, int] | None = None,
    *,
    new: dict[str, list[int]] | None = None,
    preempted: set[str] | None = None,
) -> StepPlan:
    """A step in which requests with these block tables are scheduled."""
    known = tables or {}
    return side.build_plan(
        SimpleNamespace(
            num_scheduled_tokens=scheduled or {},
            scheduled_new_reqs=[
                SimpleNamespace(block_ids=(blocks,), num_computed_tokens=0)
                for blocks in (new or {}).values()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            preempted_req_ids=preempted,
            kv_cache_block_copies=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (known[name],)),
        )
    )


def output(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "finished_recving": None,
        "finished_sending": None,
        "failed_recving": set(),
        "invalid_block_ids": set(),
    }
    return SimpleNamespace(**(fields | changes))


def ended(*jobs: int, stored: bool = True, workers: int = 2) -> WorkerReport:
    counts = Counter(dict.fromkeys(jobs, workers))
    return WorkerReport(counts, counts, counts if stored else Counter())


def store_all(side: SchedulerSide, lookups: Lookups, r: Request) -> None:
    lookups.stored = {r.chunk(i) for i in range(r.num_tokens // 256)}


def test_a_lookup_that_is_not_back_is_asked_for_again() -> None:
    side, lookups, _ = make()
    lookups.stored = None
    r = request("r", 1025)
    side.on_new_request(r)
    assert side.matched_tokens(r, 0) == (None, False)
    store_all(side, lookups, r)
    lookups.answer()
    assert side.matched_tokens(r, 0) == (1024, True)
    assert lookups.asked == 1


def test_a_hit_is_loaded_into_the_blocks_behind_the_engines_own() -> None:
    side, lookups, counters = make()
    r = request("r", 1025)
    store_all(side, lookups, r)
    side.on_new_request(r)
    assert side.matched_tokens(r, 384) == (640, True)
    side.note_allocation(r, [list(range(1, 10))], 640)
    (load,) = step(side).loads
    assert [b for chunk in load.chunks for b in chunk.block_ids] == [4, 5, 6, 7, 8]
    side.note_output(None, output(finished_recving={"r"}))
    side.note_allocation(r, [list(range(1, 10))], 0)  # the engine's second call
    assert step(side).loads == ()
    sums = counters.take().sums
    assert (sums["requested_tokens"], sums["found_tokens"]) == (1025, 640)
    assert sums["loaded_tokens"] == 640


def test_a_second_request_waits_for_chunks_that_another_loads() -> None:
    side, lookups, _ = make()
    a, b = request("a", 600), request("b", 600)
    store_all(side, lookups, a)
    for r in (a, b):
        side.on_new_request(r)
    assert side.matched_tokens(a, 0) == (512, True)
    side.note_allocation(a, [[1, 2, 3, 4]], 512)
    assert side.matched_tokens(b, 0) == (None, False)
    side.note_output(None, output(finished_recving={"a"}))
    assert side.matched_tokens(b, 512) == (0, False)  # now the engine has them


def test_without_a_shared_cache_both_load() -> None:
    side, lookups, _ = make(shares_blocks=False)
    a, b = request("a", 600), request("b", 600)
    store_all(side, lookups, a)
    for r in (a, b):
        side.on_new_request(r)
        assert side.matched_tokens(r, 0) == (512, True)
        side.note_allocation(r, [[1, 2, 3, 4]], 512)


def test_a_failed_load_is_offered_no_more_and_its_bad_chunk_is_replaced() -> None:
    side, lookups, counters = make()
    r = request("r", 600)
    store_all(side, lookups, r)
    side.on_new_request(r)
    assert side.matched_tokens(r, 0) == (512, True)
    side.note_allocation(r, [[1, 2, 3, 4, 5]], 512)
    step(side)
    report = WorkerReport(suspects={r.chunk(1)})
    side.note_output(report, output(finished_recving={"r"}, invalid_block_ids={3, 4}))
    assert "loaded_tokens" not in counters.take().sums
    assert side.matched_tokens(r, 0) == (0, False)
    # Another request is offered what comes before the bad chunk.
    other = request("o", 600)
    side.on_new_request(other)
    assert side.matched_tokens(other, 0) == (256, True)
    # What is computed again is saved over the bad chunk.
    r.num_computed_tokens = 256
    plan = step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 344})
    assert [(s.chunk.hash, s.is_replacing) for s in plan.saves] == [
        (r.chunk(0), False),
        (r.chunk(1), True),
    ]
    side.note_output(ended(*(s.job for s in plan.saves)), output())
    third = request("t", 600)
    side.on_new_request(third)
    assert side.matched_tokens(third, 0) == (512, True)


def test_a_failure_of_another_request_is_not_ones_own() -> None:
    side, lookups, counters = make(shares_blocks=False)
    a, b = request("a", 300), request("b", 300, first=7)
    lookups.stored = {a.chunk(0), b.chunk(0)}
    for r, blocks in ((a, [1, 2, 3]), (b, [4, 5, 6])):
        side.on_new_request(r)
        side.matched_tokens(r, 0)
        side.note_allocation(r, [blocks], 256)
    side.note_output(None, output(invalid_block_ids={1, 2}))  # one worker was faster
    side.note_output(None, output(finished_recving={"a", "b"}))
    assert counters.take().sums["loaded_tokens"] == 256
    assert side.matched_tokens(a, 0) == (0, False)


def test_chunks_are_saved_when_they_fill_also_while_the_answer_is_written() -> None:
    side, _, _ = make()
    r = request("r", 500)
    side.on_new_request(r)
    table = {"r": [1, 2, 3, 4]}
    plan = step(side, table, {"r": 255})
    assert plan.saves == ()
    r.num_computed_tokens = 255
    (save,) = step(side, table, {"r": 245}).saves
    assert (save.chunk.token_start, save.block_ids) == (0, (1, 2))
    assert save.token_ids == tuple(r.all_token_ids[:256])
    r.num_computed_tokens = 500
    for _ in range(11):
        r.all_token_ids.append(9)
        assert step(side, table, {"r": 1}).saves == ()
        r.num_computed_tokens += 1
    r.all_token_ids.append(9)
    (save,) = step(side, table, {"r": 1}).saves
    assert (save.chunk.token_end, save.chunk.parent) == (512, r.chunk(0))


def test_tokens_that_are_not_known_yet_are_not_saved() -> None:
    """Speculated or scheduled ahead: the engine counts them as computed before they are."""
    side, _, _ = make()
    r = request("r", 510)
    side.on_new_request(r)
    assert [s.chunk.token_end for s in step(side, {"r": [1, 2, 3, 4]}, {"r": 514}).saves] == [256]


def test_known_chunks_and_chunks_under_way_are_not_saved_again() -> None:
    side, lookups, _ = make()
    a, b = request("a", 600), request("b", 600)
    lookups.stored = {a.chunk(0)}
    for r in (a, b):
        side.on_new_request(r)
    (save,) = step(side, {"a": [1, 2, 3, 4, 5]}, {"a": 600}).saves
    assert save.chunk.hash == a.chunk(1)
    assert step(side, {"b": [1, 2, 3, 4, 6]}, {"b": 600}).saves == ()


def test_after_a_dropped_chunk_its_request_saves_no_more() -> None:
    side, _, _ = make()
    r = request("r", 600)
    side.on_new_request(r)
    (save,) = step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 256}).saves
    side.note_output(ended(save.job, stored=False), output())
    r.num_computed_tokens = 256
    assert step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 344}).saves == ()


def test_blocks_are_held_until_every_worker_has_copied_them() -> None:
    side, _, _ = make()
    r = request("r", 513)
    side.on_new_request(r)
    saves = step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 513}).saves
    r.num_computed_tokens = 513
    side.note_output(WorkerReport(settled=Counter({saves[0].job: 2, saves[1].job: 1})), output())
    assert side.finish(r, [[1, 2, 3, 4, 5]])
    assert side.is_holding_blocks
    assert step(side).held == (("r", (saves[1].job,)),)
    side.note_output(None, output(finished_sending={"r"}))
    assert not side.is_holding_blocks


def test_a_request_without_copies_under_way_gives_its_blocks_back() -> None:
    side, lookups, _ = make()
    r = request("r", 513)
    store_all(side, lookups, r)
    side.on_new_request(r)
    step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 513})
    r.num_computed_tokens = 513
    assert not side.finish(r, [[1, 2, 3, 4, 5]])


def test_the_last_chunk_is_saved_after_the_end_but_not_the_last_tokens_place() -> None:
    side, _, _ = make()
    r = request("r", 511)
    side.on_new_request(r)
    table = {"r": [1, 2, 3, 4]}
    assert len(step(side, table, {"r": 511}).saves) == 1
    r.all_token_ids.append(9)  # sampled by the last step: its place in the block stays empty
    r.num_computed_tokens = 511
    side.finish(r, [table["r"]])
    assert step(side).saves == ()

    other = request("o", 511, first=7)
    side.on_new_request(other)
    assert len(step(side, {"o": table["r"]}, {"o": 511}).saves) == 1
    other.all_token_ids += [9, 9]
    other.num_computed_tokens = 512
    assert side.finish(other, [table["r"]])
    (save,) = step(side).saves
    assert save.chunk.token_end == 512


def test_an_aborted_load_leaves_the_blocks_to_the_engine() -> None:
    side, lookups, _ = make()
    r = request("r", 600)
    store_all(side, lookups, r)
    side.on_new_request(r)
    side.matched_tokens(r, 0)
    side.note_allocation(r, [[1, 2, 3, 4, 5]], 512)
    step(side)
    assert not side.finish(r, [[1, 2, 3, 4, 5]])
    side.note_output(None, output(finished_recving={"r"}))
    # And does not keep others waiting.
    other = request("o", 600)
    side.on_new_request(other)
    assert side.matched_tokens(other, 0) == (512, True)


def test_saves_whose_blocks_a_step_writes_are_fenced() -> None:
    side, lookups, _ = make()
    r = request("r", 513)
    side.on_new_request(r)
    saves = step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 513}).saves
    assert step(side, new={"n": [8, 9]}).fenced == ()
    assert step(side, new={"n": [2, 9]}).fenced == (saves[0].job,)
    assert step(side, preempted={"r"}).fenced == tuple(s.job for s in saves)
    # A load writes too.
    loading = request("l", 300, first=5)
    lookups.stored = {loading.chunk(0)}
    side.on_new_request(loading)
    assert side.matched_tokens(loading, 0) == (256, True)
    side.note_allocation(loading, [[3, 9]], 256)
    assert step(side).fenced == (saves[1].job,)
    # What has settled needs no fence.
    side.note_output(WorkerReport(settled=Counter({saves[0].job: 2})), output())
    assert step(side, new={"n": [2, 9]}).fenced == ()


def test_a_preempted_request_is_looked_up_anew_when_its_copies_are_over() -> None:
    side, lookups, _ = make()
    r = request("r", 600)
    side.on_new_request(r)
    saves = step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 600}).saves
    r.num_preemptions = 1
    assert side.matched_tokens(r, 0) == (None, False)
    store_all(side, lookups, r)
    side.note_output(ended(*(s.job for s in saves)), output())
    assert side.matched_tokens(r, 0) == (512, True)
    assert lookups.asked == 2


def test_what_hashes_cannot_tell_apart_is_not_cached() -> None:
    side, lookups, _ = make()
    strange = [request(name, 600) for name in ("lora", "embeds", "session")]
    strange[0].lora_request = object()
    strange[1].prompt_token_ids = None  # type: ignore[assignment]
    strange[2].resumable = True
    for r in strange:
        side.on_new_request(r)
        assert side.matched_tokens(r, 0) == (0, False)
        assert step(side, {r.request_id: [1, 2, 3, 4, 5]}, {r.request_id: 600}).saves == ()
        assert not side.finish(r, [[1, 2, 3, 4, 5]])
    assert lookups.asked == 0


def test_a_request_that_must_not_read_is_saved_all_the_same() -> None:
    side, lookups, _ = make()
    r = request("r", 600)
    store_all(side, lookups, r)
    r.skip_reading_prefix_cache = True
    side.on_new_request(r)
    assert side.matched_tokens(r, 0) == (0, False)
    assert len(step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 600}).saves) == 2


def test_each_role_does_only_its_part() -> None:
    side, lookups, _ = make(can_load=False)
    r = request("r", 600)
    store_all(side, lookups, r)
    side.on_new_request(r)
    assert side.matched_tokens(r, 0) == (0, False)
    assert len(step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 600}).saves) == 2
    side, lookups, _ = make(can_save=False)
    store_all(side, lookups, r)
    side.on_new_request(r)
    assert side.matched_tokens(r, 0) == (512, True)
    lookups.stored = set()
    assert step(side, {"r": [1, 2, 3, 4, 5]}, {"r": 600}).saves == ()


def test_after_a_reset_requests_under_way_go_to_neither_place() -> None:
    side, lookups, _ = make()
    old = request("old", 600)
    store_all(side, lookups, old)
    side.on_new_request(old)
    side.reset(Place(b"kv/m@" + b"1" * 32, "m", "1" * 32))
    assert side.matched_tokens(old, 0) == (0, False)
    assert step(side, {"old": [1, 2, 3, 4, 5]}, {"old": 600}).saves == ()
