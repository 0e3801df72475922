"""The connector in a vLLM worker: runs what the scheduler planned, against the worker's own memory.

Called by the engine's thread once per step; all I/O and all copies are on threads.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from gpu_bridge.copies import Copier, copier_for
from gpu_bridge.counters import Counters
from gpu_bridge.layout import GroupLayout
from gpu_bridge.link import Link
from gpu_bridge.loads import Loader
from gpu_bridge.plan import Geometry, StepPlan
from gpu_bridge.reports import WorkerReport
from gpu_bridge.saves import Saver
from gpu_bridge.settings import BridgeSettings
from gpu_bridge.shard import Shard
from gpu_bridge.staging import StagingPool, slots_for
from kvfs.client import Client
from kvfs.config import (
    BRIDGE_FENCE_DEADLINE_S,
    BRIDGE_SHUTDOWN_DEADLINE_S,
    BRIDGE_STAGING_BYTES,
)
from kvfs.reader.complaints import Complaints

log = logging.getLogger(__name__)

_SAVE_THREADS_MAX = 2
# An engine with nothing to compute would step again at once, and take the GIL from the loads.
_IDLE_WAIT_S = 0.005


@dataclass(slots=True)
class StepResults:
    """What a step hands to vLLM. With several KV groups a failed load is a failed request, with one
    it is its failed blocks: what came before them stays."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerSide:
    """See the module's docstring. Owns the worker's buffers, threads and connections."""

    def __init__(
        self,
        settings: BridgeSettings,
        geometry: Geometry,
        layouts: Mapping[int, GroupLayout],
        *,
        rank: int,
        engine: str,
        model: str,
        device: torch.device,
        counters: Counters,
    ) -> None:
        shard = Shard(rank, engine, geometry, layouts)
        slot_bytes = shard.file_bytes_max(model)
        count = slots_for(
            settings.staging_bytes, BRIDGE_STAGING_BYTES, slot_bytes, settings.threads
        )
        staging = StagingPool(count, slot_bytes, pin=device.type == "cuda")
        copier: Copier = copier_for(device)
        # A connection each: a load never waits behind a save.
        self._links = [
            Link(settings.store, deadline_s=settings.deadline_s, start=settings.start_node)
            for _ in range(2)
        ]
        self._complaints = Complaints(Client(settings.store), settings.deadline_s)
        self._counters = counters
        self._copier = copier
        self._loader = Loader(
            shard, self._links[0], self._complaints, staging, copier, counters,
            threads=settings.threads, deadline_s=settings.deadline_s,
        )  # fmt: skip
        self._saver = Saver(
            shard, self._links[1], staging, copier, counters,
            threads=min(_SAVE_THREADS_MAX, settings.threads),
        )  # fmt: skip
        self._has_one_group = len(geometry.groups) == 1
        self._is_idle = False
        self._held: dict[str, set[int]] = {}
        self._failed_blocks: set[int] = set()
        self._suspects: set[bytes] = set()
        log.info(
            "kvfs: rank %d moves chunks of %d tokens through %d buffers of %.1f MiB (%s)",
            rank,
            geometry.chunk_tokens,
            count,
            slot_bytes / 2**20,
            "pinned" if device.type == "cuda" else "pageable",
        )

    def before_step(self, plan: StepPlan) -> None:
        """Let go of blocks that the step will write."""
        if plan.fenced:
            self._saver.settle(plan.fenced, BRIDGE_FENCE_DEADLINE_S)

    def start_loads(self, plan: StepPlan) -> None:
        if not plan.loads or plan.place is None:
            return
        after = self._copier.mark()
        for request in plan.loads:
            self._loader.submit(plan.place, request, after)

    def start_saves(self, plan: StepPlan) -> None:
        """Called when the step's work has been submitted to the device."""
        self._is_idle = plan.is_idle
        if plan.saves and plan.place is not None:
            self._saver.submit(plan.place, plan.saves, self._copier.mark())
        for request_id, jobs in plan.held:
            self._held[request_id] = set(jobs)

    def take_results(self, finished: Iterable[str]) -> StepResults:
        """What ended since the last step."""
        for request_id in finished:
            self._loader.cancel(request_id)
        if self._is_idle:
            self._loader.wait(_IDLE_WAIT_S)
        results = StepResults()
        for outcome in self._loader.take_outcomes():
            results.received.add(outcome.request_id)
            self._suspects |= outcome.suspects
            if not outcome.is_whole:
                if self._has_one_group:
                    self._failed_blocks |= outcome.failed_blocks
                else:
                    results.failed.add(outcome.request_id)
        for request_id, jobs in list(self._held.items()):
            if all(self._saver.is_settled(job) for job in jobs):
                del self._held[request_id]
                results.sent.add(request_id)
        return results

    def take_failed_blocks(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_report(self) -> WorkerReport:
        ends = self._saver.take_ends()
        report = WorkerReport(
            Counter(self._saver.take_settled()),
            Counter(end.job for end in ends),
            Counter(end.job for end in ends if end.is_stored),
            self._suspects,
        )
        self._suspects = set()
        return report

    def close(self) -> None:
        """Save what is still to be saved, within a deadline."""
        self._saver.close(BRIDGE_SHUTDOWN_DEADLINE_S)
        self._loader.close()
        self._complaints.close()
        for link in self._links:
            link.close()
