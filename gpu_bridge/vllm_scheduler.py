"""The connector in vLLM's scheduler: what is a hit, what is loaded, what is saved.

Runs on the engine's thread and waits for nothing, but a moment (`_PATIENCE_S`) for a look-up that
is nearly there. Look-ups run on a thread of their own; everything else is bookkeeping on vLLM's own
objects, of which this module reads attributes only, so that it needs no vLLM to be tested.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_bridge.counters import Counters
from gpu_bridge.ledger import SaveLedger, blocks_from
from gpu_bridge.lookup import Answer, Lookup, LookupService
from gpu_bridge.plan import ChunkSave as Save
from gpu_bridge.plan import (
    Geometry,
    Place,
    RequestLoad,
    StepPlan,
    blocks_of_chunk,
    chunk_hash,
    chunk_of,
    hashed_chunks,
    hit_end,
    plan_load,
)
from gpu_bridge.reports import WorkerReport
from gpu_bridge.settings import BridgeSettings
from kvfs.config import BRIDGE_SUSPECTS_MAX

log = logging.getLogger(__name__)

# How long a step may wait for a look-up: beside others, and when there is nothing else to do.
_PATIENCE_S = 0.0008
_LONE_PATIENCE_S = 0.005


@dataclass(slots=True)
class _State:
    """What is known of one request. `next_chunk`: the first that was not yet considered for saving.
    `local_tokens`: what the engine had itself when it last asked."""

    request: Any
    lookup: Lookup | None = None
    preemptions: int = 0
    local_tokens: int = 0
    next_chunk: int = 0
    has_failed: bool = False  # a load of this request failed: it loads no more
    is_saving: bool = True
    is_counted: bool = False


@dataclass(slots=True)
class _Loading:
    """A load under way: `hashes` of its chunks, so that others can wait for it."""

    hashes: frozenset[bytes]
    block_ids: frozenset[int]
    tokens: int
    has_failed: bool = False


@dataclass(slots=True)
class _Step:
    """Collected between two calls of `build_plan`."""

    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    held: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    has_waited: bool = False


class SchedulerSide:
    """See the module's docstring. `place` None: nothing is loaded or saved (yet)."""

    def __init__(
        self,
        settings: BridgeSettings,
        geometry: Geometry,
        lookups: LookupService,
        counters: Counters,
        *,
        can_load: bool,
        can_save: bool,
        shares_blocks: bool,
    ) -> None:
        self._settings = settings
        self._geometry = geometry
        self._lookups = lookups
        self._counters = counters
        self._can_load = can_load
        self._can_save = can_save
        self._shares_blocks = shares_blocks  # the engine's own prefix cache is on
        self.place: Place | None = None
        self._states: dict[str, _State] = {}
        self._loading: dict[str, _Loading] = {}
        self._ledger = SaveLedger(geometry.shards)
        self._delayed: set[str] = set()
        self._suspects: OrderedDict[bytes, None] = OrderedDict()
        self._step = _Step()

    # Hits -----------------------------------------------------------------------------------------
    def on_new_request(self, request: Any) -> None:
        """Begin to look up what is stored of the request."""
        if self.place is None or not _is_cacheable(request):
            return
        state = _State(request)
        self._states[request.request_id] = state
        if self._can_load and not request.skip_reading_prefix_cache:
            state.lookup = self._look_up(request)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind `local_tokens` can be loaded, and whether that takes longer than
        this step; None: ask again."""
        state = self._states.get(request.request_id)
        if state is None or state.lookup is None or state.has_failed:
            return 0, False
        if self._ledger.unsettled(request.request_id):
            return None, False  # preempted while its blocks are copied: soon over
        if request.num_preemptions != state.preemptions:
            state.preemptions = request.num_preemptions
            state.lookup.waiting.end()
            state.lookup = self._look_up(request)
        answer = state.lookup.answer(self._patience_s())
        if answer is None:
            self._step.has_waited = True
            return None, False
        end = hit_end(
            self._geometry,
            self._without_suspects(state.lookup, answer),
            local_tokens,
            request.num_tokens,
        )
        first = local_tokens // self._geometry.chunk_tokens
        if end > local_tokens and self._is_loading(state.lookup.hashes[first]):
            return None, False  # another request brings the same chunks
        state.local_tokens = local_tokens
        self._count_query(state)
        if end == local_tokens:
            state.lookup.waiting.end()
        return end - local_tokens, end > local_tokens

    def note_allocation(
        self, request: Any, block_tables: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Blocks were allocated for a hit: plan its load."""
        if external_tokens == 0:
            return
        state = self._states[request.request_id]
        if state.lookup is not None:
            state.lookup.waiting.end()
        end = state.local_tokens + external_tokens
        chunks = plan_load(
            self._geometry,
            request.block_hashes,
            {group.index: block_tables[group.index] for group in self._geometry.groups},
            state.local_tokens,
            end,
        )
        block_ids = frozenset(block for load in chunks for block in load.block_ids)
        self._loading[request.request_id] = _Loading(
            frozenset(load.chunk.hash for load in chunks), block_ids, external_tokens
        )
        self._step.loads.append(RequestLoad(request.request_id, chunks))
        self._step.allocated += block_ids
        self._counters.add("found_tokens", external_tokens)

    def _patience_s(self) -> float:
        if self._step.has_waited:
            return 0.0
        return _LONE_PATIENCE_S if len(self._states) == 1 else _PATIENCE_S

    def _look_up(self, request: Any) -> Lookup:
        assert self.place is not None
        hashes = request.block_hashes
        count = hashed_chunks(self._geometry, hashes)
        return self._lookups.start(
            self.place, [bytes(chunk_hash(self._geometry, hashes, i)) for i in range(count)]
        )

    def _without_suspects(self, lookup: Lookup, answer: Answer) -> Answer:
        if not self._suspects:
            return answer
        nothing = (False,) * len(self._geometry.groups)
        return [
            nothing if chunk in self._suspects else groups
            for chunk, groups in zip(lookup.hashes, answer, strict=False)
        ]

    def _is_loading(self, chunk: bytes) -> bool:
        return self._shares_blocks and any(
            chunk in loading.hashes for loading in self._loading.values()
        )

    def _count_query(self, state: _State) -> None:
        if not state.is_counted:
            state.is_counted = True
            self._counters.add("requests")
            self._counters.add("requested_tokens", state.request.num_tokens)

    # Saves ----------------------------------------------------------------------------------------
    def build_plan(self, output: Any) -> StepPlan:
        """What the workers do in this step. `output`: vLLM's SchedulerOutput."""
        step, self._step = self._step, _Step()
        if self.place is None:
            return StepPlan()
        step.allocated += self._newly_allocated(output)
        fenced = self._ledger.touching(step.allocated)
        for request_id in output.preempted_req_ids or ():
            fenced |= set(self._ledger.unsettled(request_id))
        if self._can_save and output.kv_connector_block_state is not None:
            tables_of = output.kv_connector_block_state.get_block_ids
            for request_id, scheduled in output.num_scheduled_tokens.items():
                state = self._states.get(request_id)
                if state is not None:
                    tokens = state.request.num_computed_tokens + scheduled
                    step.saves += self._saves_up_to(state, tokens, tables_of)
        return StepPlan(
            self.place,
            tuple(step.loads),
            tuple(step.saves),
            tuple(sorted(fenced)),
            tuple(step.held),
            is_idle=not output.num_scheduled_tokens,
        )

    def finish(self, request: Any, block_tables: Sequence[Sequence[int]]) -> bool:
        """A request ended. True: its blocks stay until a worker says that it sent them."""
        state = self._states.pop(request.request_id, None)
        if state is not None and state.lookup is not None:
            state.lookup.waiting.end()
        if state is None or request.request_id in self._loading:
            return False  # of a load that was not waited for, the engine frees the blocks itself
        # What steps in flight compute is not there yet, and the last token's place stays empty.
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        tokens = min(computed, request.num_tokens - 1)
        if self._can_save:
            self._step.saves += self._saves_up_to(state, tokens, lambda _: block_tables)
        unsettled = self._ledger.unsettled(request.request_id)
        if not unsettled:
            return False
        self._step.held.append((request.request_id, unsettled))
        self._delayed.add(request.request_id)
        return True

    def _saves_up_to(
        self,
        state: _State,
        computed_tokens: int,
        tables_of: Callable[[str], Sequence[Sequence[int]] | None],
    ) -> list[Save]:
        """Saves of the chunks that became full, and that nobody has or makes."""
        request, geometry = state.request, self._geometry
        full = min(
            min(computed_tokens, request.num_tokens) // geometry.chunk_tokens,
            hashed_chunks(geometry, request.block_hashes),
        )
        if full <= state.next_chunk or not state.is_saving:
            return []
        tables = tables_of(request.request_id)
        if tables is None:
            return []
        indexes = range(state.next_chunk, full)
        state.next_chunk = full
        return [save for index in indexes for save in self._saves_of(state, index, tables)]

    def _saves_of(
        self, state: _State, index: int, tables: Sequence[Sequence[int]]
    ) -> Iterable[Save]:
        request, geometry = state.request, self._geometry
        answer = None if state.lookup is None else state.lookup.answer(0)
        for position, group in enumerate(geometry.groups):
            chunk = chunk_of(geometry, request.block_hashes, index, group)
            is_suspect = chunk.hash in self._suspects
            is_known = answer is not None and index < len(answer) and answer[index][position]
            if self._ledger.is_saving(chunk) or (is_known and not is_suspect):
                continue
            block_ids = blocks_of_chunk(geometry, group, tables[group.index], index)
            if block_ids is None:
                continue  # a window has moved on
            token_ids = None
            if self._settings.store_token_ids:
                token_ids = tuple(request.all_token_ids[chunk.token_start : chunk.token_end])
            yield self._ledger.open(
                request.request_id, chunk, block_ids, token_ids, is_replacing=is_suspect
            )

    def _newly_allocated(self, output: Any) -> list[int]:
        """Blocks that this step may write and that others may still be copied from."""
        if not len(self._ledger):
            return []
        blocks: list[int] = []
        for new in output.scheduled_new_reqs:
            blocks += self._behind(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, tables, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if tables is not None:
                is_resumed = request_id in cached.resumed_req_ids
                blocks += self._behind(tables, computed if is_resumed else 0)
        blocks += [copy.dst_block_id for copy in output.kv_cache_block_copies or ()]
        return blocks

    def _behind(self, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        """The blocks of a table behind the tokens that were computed before this step."""
        first = [tokens // group.block_tokens for group in self._geometry.groups]
        return blocks_from(tables, first)

    # What comes back ------------------------------------------------------------------------------
    def note_output(self, report: WorkerReport | None, output: Any) -> None:
        """The workers' answers to a step. `output`: vLLM's KVConnectorOutput."""
        for request_id, loading in self._loading.items():
            loading.has_failed |= request_id in output.failed_recving
            loading.has_failed |= not loading.block_ids.isdisjoint(output.invalid_block_ids)
        for request_id in output.finished_recving or ():
            self._note_loaded(request_id)
        self._delayed -= set(output.finished_sending or ())
        if report is None:
            return
        for chunk in report.suspects:
            self._suspects[chunk] = None
            if len(self._suspects) > BRIDGE_SUSPECTS_MAX:
                self._suspects.popitem(last=False)
        for ended in self._ledger.note(report):
            if ended.is_stored:
                self._suspects.pop(ended.chunk.hash, None)
            elif (state := self._states.get(ended.request_id)) is not None:
                state.is_saving = False  # what would follow could not be reached without it

    def _note_loaded(self, request_id: str) -> None:
        loading = self._loading.pop(request_id, None)
        state = self._states.get(request_id)
        if loading is None or state is None:
            return
        if loading.has_failed:
            state.has_failed = True
            state.lookup = None  # what it said is not so: save what is recomputed
        else:
            self._counters.add("loaded_tokens", loading.tokens)

    @property
    def is_holding_blocks(self) -> bool:
        """Whether blocks of finished requests become free soon."""
        return bool(self._delayed)

    @property
    def is_saving(self) -> bool:
        return len(self._ledger) > 0

    def reset(self, place: Place) -> None:
        """Forget what was found and go on at another place; requests under way go to neither."""
        self.place = place
        self._suspects.clear()
        for state in self._states.values():
            state.lookup = None
            state.is_saving = False

    def close(self, deadline_s: float) -> None:
        self._lookups.close(deadline_s)


def _is_cacheable(request: Any) -> bool:
    """Not what prefix hashes cannot tell apart between processes: an adapter's weights (its name is
    in the hash, its content not), and prompts that are no token ids."""
    return (
        request.lora_request is None
        and request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.resumable
    )
