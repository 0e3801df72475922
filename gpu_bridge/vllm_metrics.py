"""The bridge's counters in vLLM's log line and at its Prometheus endpoint."""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    Counter,
    Histogram,
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from gpu_bridge.counters import Tally

_COUNTERS = {
    "requests": "Requests that kvfs looked up.",
    "requested_tokens": "Tokens of the requests that kvfs looked up.",
    "found_tokens": "Tokens that kvfs offered from files.",
    "loaded_tokens": "Tokens that were loaded from files.",
    "loaded_chunks": "Chunk files read, of all ranks.",
    "loaded_bytes": "Bytes read from chunk files, of all ranks.",
    "loaded_remote_bytes": "Of these, bytes that came straight from other nodes.",
    "saved_chunks": "Chunk files written, of all ranks.",
    "saved_bytes": "Bytes written to chunk files, of all ranks.",
    "save_seconds": "Time spent on copying and writing chunks, summed over threads.",
    "known_chunks": "Chunks not written because the store had them.",
    "lookups": "Batches of look-ups.",
    "lookup_seconds": "Time that look-ups took.",
}
_BY_REASON = {
    "failed_loads": "Chunks that could not be loaded and were recomputed.",
    "dropped_saves": "Chunks that were not saved.",
    "failed_lookups": "Look-ups without an answer.",
}
_BY_SOURCE = {
    "reads": "Reads of chunk files, whole or in parts, by the place that gave them.",
    "read_bytes": "Bytes of chunk files, by the place that gave them.",
    "hedges_won": "Reads that repeated a late one and came first.",
    "hedges_lost": "Reads that repeated a late one and came second.",
}
_LABELS = dict.fromkeys(_BY_REASON, "reason") | dict.fromkeys(_BY_SOURCE, "source")
_LOAD_SECONDS = "load_seconds"
_LOAD_BUCKETS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30]
_PREFIX = "vllm:kvfs_"


class KvfsStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there to check
    """One interval: `data` has `sums` (a name to a number) and `load_seconds` (a list)."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or _empty())

    @classmethod
    def of(cls, tally: Tally) -> "KvfsStats":
        return cls({"sums": dict(tally.sums), _LOAD_SECONDS: list(tally.load_seconds)})

    def reset(self) -> None:
        self.data = _empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        sums: dict[str, float] = self.data["sums"]
        for name, amount in other.data["sums"].items():
            sums[name] = sums.get(name, 0) + amount
        self.data[_LOAD_SECONDS] += other.data[_LOAD_SECONDS]
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows."""
        sums: Mapping[str, float] = self.data["sums"]
        loads: list[float] = sorted(self.data[_LOAD_SECONDS])
        line: dict[str, int | float] = {
            "kvfs tokens requested": int(sums.get("requested_tokens", 0)),
            "found": int(sums.get("found_tokens", 0)),
            "loaded": int(sums.get("loaded_tokens", 0)),
            "MB loaded": round(sums.get("loaded_bytes", 0) / 1e6, 1),
            "MB saved": round(sums.get("saved_bytes", 0) / 1e6, 1),
        }
        if loads:
            line["median load (ms)"] = round(loads[len(loads) // 2] * 1e3, 1)
        for name, amount in sorted(sums.items()):
            kind, _, label = name.partition(".")
            if kind in _BY_REASON:
                line[f"{kind.replace('_', ' ')} ({label.replace('_', ' ')})"] = int(amount)
            elif kind == "read_bytes":
                line[f"MB from {label}"] = round(amount / 1e6, 1)
        return line

    def is_empty(self) -> bool:
        return not self.data["sums"] and not self.data[_LOAD_SECONDS]


def _empty() -> dict[str, Any]:
    return {"sums": {}, _LOAD_SECONDS: []}


class KvfsPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """Counters `vllm:kvfs_*` with the engine's labels, failures also with a `reason`, reads with
    their `source`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: counter(f"{_PREFIX}{name}", documentation, labelnames=labelnames)
            for name, documentation in _COUNTERS.items()
        }
        self._labelled = {
            name: counter(
                f"{_PREFIX}{name}", documentation, labelnames=[*labelnames, _LABELS[name]]
            )
            for name, documentation in (_BY_REASON | _BY_SOURCE).items()
        }
        self._load_seconds = histogram(
            f"{_PREFIX}{_LOAD_SECONDS}",
            "Time from the start of a request's load to its end.",
            labelnames=labelnames,
            buckets=_LOAD_BUCKETS,
        )
        for labels in per_engine_labelvalues.values():  # shown as 0 from the start
            for metric in (*self._counters.values(), self._load_seconds):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data["sums"].items():
            kind, _, label = name.partition(".")
            if label:
                self._labelled[kind].labels(*labels, label).inc(amount)
            else:
                self._counters[kind].labels(*labels).inc(amount)
        for seconds in transfer_stats_data[_LOAD_SECONDS]:
            self._load_seconds.labels(*labels).observe(seconds)
