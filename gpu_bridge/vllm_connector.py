"""vLLM's connector: `"kv_connector": "KvfsConnector"`, `"kv_connector_module_path":
"gpu_bridge.vllm_connector"`.

vLLM makes one object in its scheduler and one in each worker. This module translates between vLLM's
calls and the two sides, `vllm_scheduler` and `vllm_worker`; it decides nothing else.
"""

import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from gpu_bridge.counters import Counters
from gpu_bridge.fingerprint import model_name
from gpu_bridge.layout import GroupLayout, group_layout
from gpu_bridge.link import Link
from gpu_bridge.lookup import LookupService
from gpu_bridge.plan import Geometry, StepPlan
from gpu_bridge.reports import WorkerReport
from gpu_bridge.settings import parse_settings
from gpu_bridge.vllm_facts import (
    ENGINE,
    WorkerFacts,
    check_hash_seed,
    read_geometry,
    resolve_place,
    unsupported_reason,
    worker_facts,
)
from gpu_bridge.vllm_metrics import KvfsPromMetrics, KvfsStats
from gpu_bridge.vllm_scheduler import SchedulerSide
from gpu_bridge.vllm_worker import WorkerSide
from kvfs.config import BRIDGE_LOOKUP_DEADLINE_S, BRIDGE_SHUTDOWN_DEADLINE_S
from kvfs.start import node_command

log = logging.getLogger(__name__)


@dataclass
class KvfsMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there to check
    """Scheduler to workers, each step."""

    plan: StepPlan


@dataclass
class KvfsWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """Workers to scheduler, after a step in which something ended."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvfsWorkerMetadata)
        self.report.add(other.report)
        return self


@dataclass
class KvfsHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """Workers to scheduler, once."""

    facts: WorkerFacts


class KvfsConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # as above
    """Keeps vLLM's KV cache in kvfs's files. See docs/vllm.md for what a person may set."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        self._settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        check_hash_seed(vllm_config)
        self._counters = Counters()
        self._geometry: Geometry | None = None
        self._facts: dict[int, WorkerFacts] = {}
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        reason = unsupported_reason(kv_cache_config)
        if reason is not None:
            if role is KVConnectorRole.SCHEDULER:
                log.warning("kvfs: this model's KV cache is not kept in files: %s", reason)
            return
        self._geometry = read_geometry(vllm_config, kv_cache_config, self._settings)
        if role is KVConnectorRole.SCHEDULER:
            self._recompute_after_failures()
            self._scheduler = self._make_scheduler(self._geometry)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not saved is computed again

    # Scheduler ------------------------------------------------------------------------------------
    def _make_scheduler(self, geometry: Geometry) -> SchedulerSide:
        settings, transfer = self._settings, self._kv_transfer_config
        if settings.start_node and node_command() is None:
            log.info("kvfs: no node can be started from here; start one with kvfs mount")
        deadline_s = min(settings.deadline_s, BRIDGE_LOOKUP_DEADLINE_S)
        link = Link(settings.store, deadline_s=deadline_s, start=settings.start_node)
        return SchedulerSide(
            settings,
            geometry,
            LookupService(link, geometry, self._counters, deadline_s),
            self._counters,
            can_load=settings.load and transfer.is_kv_consumer,
            can_save=settings.save and transfer.is_kv_producer,
            shares_blocks=bool(self._vllm_config.cache_config.enable_prefix_caching),
        )

    def _recompute_after_failures(self) -> None:
        """A load that fails must never end a request. vLLM reads this setting after it has made its
        scheduler's connector."""
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            log.info('kvfs: set kv_load_failure_policy to "recompute": a failed load is a miss')

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for handshake in metadata.values():
            assert isinstance(handshake, KvfsHandshake)
            self._facts[handshake.facts.rank] = handshake.facts
        self._settle_place("")

    def _settle_place(self, salt: str) -> None:
        if self._scheduler is None or self._geometry is None:
            return
        facts = [self._facts[rank] for rank in sorted(self._facts)]
        place = resolve_place(self._vllm_config, self._kv_cache_config, self._geometry, facts, salt)
        self._scheduler.reset(place)
        log.info("kvfs: chunks of %s lie in %s", self._settings.store, place.namespace.decode())

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.note_allocation(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return KvfsMetadata(StepPlan())
        return KvfsMetadata(self._scheduler.build_plan(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        assert meta is None or isinstance(meta, KvfsWorkerMetadata)
        self._scheduler.note_output(None if meta is None else meta.report, connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        return self._scheduler.finish(request, block_ids), None

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_holding_blocks

    def has_pending_push_work(self) -> bool:
        """Keep stepping until saves have ended, so that their counts are seen in time."""
        return self._scheduler is not None and self._scheduler.is_saving

    def reset_cache(self) -> bool | None:
        """Weights may have changed: nothing stored may be used, and nothing of this process may be
        found by others. So it goes on in a namespace of its own."""
        self._settle_place(secrets.token_hex(8))
        return True

    # Worker ---------------------------------------------------------------------------------------
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        geometry, config = self._geometry, self._kv_cache_config
        if geometry is None:
            return
        layouts: dict[int, GroupLayout] = {
            index: group_layout(
                index,
                [name for name in group.layer_names if name in kv_caches],  # of this rank
                kv_caches,
                config.num_blocks,
            )
            for index, group in enumerate(config.kv_cache_groups)
        }
        rank = self._vllm_config.parallel_config.rank
        self._facts[rank] = worker_facts(self._vllm_config, layouts, list(kv_caches))
        self._worker = WorkerSide(
            self._settings,
            geometry,
            layouts,
            rank=rank,
            engine=ENGINE,
            model=model_name(self._vllm_config.model_config.model),
            device=next(iter(kv_caches.values())).device,
            counters=self._counters,
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        facts = self._facts.get(self._vllm_config.parallel_config.rank)
        return None if facts is None else KvfsHandshake(facts)

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvfsMetadata)
        return metadata.plan

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KvfsMetadata)
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # a request runs only when all of its blocks were loaded

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        return  # whole blocks are saved after the step

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.take_results(finished_req_ids)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        report = self._worker.take_report()
        return None if report.is_empty else KvfsWorkerMetadata(report)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close(BRIDGE_SHUTDOWN_DEADLINE_S)
            self._scheduler = None

    # Statistics -----------------------------------------------------------------------------------
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        tally = self._counters.take()
        return None if tally.is_empty else KvfsStats.of(tally)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KvfsStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvfsPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _log_as_vllm_does() -> None:
    """vLLM gives handlers to loggers of its own name only."""
    source = logging.getLogger("vllm")
    for name in ("gpu_bridge", "kvfs"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.handlers = source.handlers
            logger.setLevel(source.level)
            logger.propagate = False
