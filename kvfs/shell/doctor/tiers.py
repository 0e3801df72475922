"""The tiers of a store's configuration, as the node that uses them says they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfs.client import Client
from kvfs.errors import InvalidInput, KvfsError
from kvfs.settings.load import load_config_of_store
from kvfs.settings.words import TierKind
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.render import size_text

_AGAIN = "the node tries again by itself, and serves without it"
_DIRECTORY_ADVICE = (
    f"see that the file system is mounted, answers, and lets the node write; {_AGAIN}"
)
_ADVICE = {kind.value: _DIRECTORY_ADVICE for kind in TierKind} | {
    TierKind.OBJECT.value: "see that the bucket is there, url, endpoint and region are right, and"
    f" the node's credentials may list, get, put and delete in it (docs/tiers.md); {_AGAIN}"
}


def check_tiers(store: Path) -> Iterator[Finding]:
    """Whether each is open, answers and has room."""
    try:
        tiers = load_config_of_store([store]).tiers
    except InvalidInput:
        return  # which is said of the settings
    if not tiers:
        return
    try:
        with Client(store) as client:
            told = client.status().get("tiering")
    except KvfsError:
        names = ", ".join(tier.name for tier in tiers)
        yield Finding("tiers", Level.OK, f"{names}: a node opens them when it starts")
        return
    shown = {} if told is None else {tier["name"]: tier for tier in told["tiers"]}
    for tier in tiers:
        yield _finding(tier.name, shown.get(tier.name))


def _finding(name: str, told: dict[str, Any] | None) -> Finding:
    if told is None:
        advice = "restart the node, which reads its configuration when it starts"
        return Finding("tier", Level.WARN, f"{name}: the node does not have it yet", advice)
    if not told["is_open"]:
        advice = "mend what it says; the node tries again by itself, and serves without it"
        return Finding("tier", Level.FAIL, f"{name} is not open: {told['trouble']}", advice)
    if told["health"] != "up" or told["trouble"]:
        state = "keeps failing" if told["health"] == "up" else f"does not answer ({told['health']})"
        said = f": {told['trouble']}" if told["trouble"] else ""
        return Finding("tier", Level.WARN, f"{name} {state}{said}", _ADVICE[told["kind"]])
    if told["is_full"]:
        advice = "free some room there, or give the tier max_bytes, above which the node evicts"
        return Finding("tier", Level.WARN, f"{name} is full: nothing is copied there", advice)
    held = f"{told['blobs']:,} blobs of {size_text(told['size_bytes'])}"
    return Finding("tier", Level.OK, f"{name}: open, {held}")
