"""A node's status as Prometheus reads it: the text behind `.kvfs/metrics` in the mount."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_NODE_GAUGES = ("clients", "files", "blobs", "size_bytes", "used_bytes")
_MOUNT_GAUGES = ("open_in_passthrough", "open_in_python", "unsettled_files", "unsettled_bytes")
_DIRECTORY_GAUGES = ("used_bytes", "room_bytes", "disk_free_bytes", "staging_bytes")
_TIER_GAUGES = (
    "blobs", "size_bytes", "free_bytes", "in_flight", "read_bytes_per_s", "put_bytes_per_s",
    "expected_bytes_per_s", "latency_s", "reads_wanted",
)  # fmt: skip
_TIER_COUNTERS = (
    "hits", "misses", "read_bytes", "puts", "put_bytes", "failures", "stalls", "corrupt",
    "hedges_won", "hedges_lost",
)  # fmt: skip
_BEHIND_COUNTERS = ("copied_files", "copied_bytes", "dropped_files", "demoted_files")
_READING_COUNTERS = ("brought_files", "brought_bytes", "failed_files")

Labelled = Sequence[tuple[Mapping[str, str], Any]]  # a value for each set of labels


def metrics_text(status: Mapping[str, Any]) -> str:
    """The exposition format, from a document of `kvfs.status.status_of`. What is not known is left
    out."""
    return "\n".join([*_lines(status), ""])


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    for name in _NODE_GAUGES:
        yield from _metric(name, "gauge", [({}, status[name])])
    yield from _metric("start_time_seconds", "gauge", [({}, status["started_ns"] / 1e9)])
    for name, value in status["counters"].items():
        yield from _metric(f"{name}_total", "counter", [({}, value)])
    if (mount := status["mount"]) is not None:
        for name in _MOUNT_GAUGES:
            yield from _metric(f"mount_{name}", "gauge", [({}, mount[name])])
    directories = [one for one in status["directories"] if one["present"]]
    yield from _of_each("directory", "path", directories, _DIRECTORY_GAUGES, ())
    if (tiering := status["tiering"]) is None:
        return
    tiers = tiering["tiers"]
    is_up = [({"tier": one["name"]}, int(one["health"] == "up")) for one in tiers]
    yield from _metric("tier_up", "gauge", is_up)
    yield from _of_each("tier", "name", tiers, _TIER_GAUGES, _TIER_COUNTERS)
    behind, reading, evicted = tiering["behind"], tiering["reading"], tiering["evicted"]
    yield from _metric("tier_copies_waiting", "gauge", [({}, behind["waiting"])])
    yield from _metric("tier_fetches", "gauge", [({}, reading["under_way"])])
    for table, names in ((behind, _BEHIND_COUNTERS), (reading, _READING_COUNTERS)):
        for name in names:
            yield from _metric(f"tier_{name}_total", "counter", [({}, table[name])])
    for name, value in evicted.items():
        yield from _metric(f"tier_evicted_{name}_total", "counter", [({}, value)])


def _of_each(
    what: str,
    key: str,
    items: Sequence[Mapping[str, Any]],
    gauges: Iterable[str],
    counters: Iterable[str],
) -> Iterator[str]:
    """The same values of several things, told apart by a label."""
    for names, kind, end in ((gauges, "gauge", ""), (counters, "counter", "_total")):
        for name in names:
            values = [({what: item[key]}, item[name]) for item in items]
            yield from _metric(f"{what}_{name}{end}", kind, values)


def _metric(name: str, kind: str, values: Labelled) -> Iterator[str]:
    known = [(labels, value) for labels, value in values if value is not None]
    if known:
        yield f"# TYPE kvfs_{name} {kind}"
    for labels, value in known:
        shown = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        yield f"kvfs_{name}{{{shown}}} {value}" if shown else f"kvfs_{name} {value}"


def _escape(text: str) -> str:
    readable = text.encode(errors="surrogateescape").decode(errors="replace")
    return readable.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
