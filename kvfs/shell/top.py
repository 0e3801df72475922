"""`kvfs top`: what a node does now, second by second."""

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvfs.names import escape
from kvfs.shell.render import age_text, size_text, table
from kvfs.shell.session import Session
from kvfs.shell.tiers import tier_lines

_CLEAR = "\x1b[H\x1b[2J"
_RATES = (  # in the order in which they are shown: counter, what it is, whether it counts bytes
    ("lookups", "look-ups", False),
    ("lookup_hits", "hits", False),
    ("opens", "opens", False),
    ("open_misses", "misses of opens", False),
    ("published_files", "files stored", False),
    ("published_bytes", "bytes stored", True),
    ("evicted_files", "files evicted", False),
    ("evicted_bytes", "bytes evicted", True),
    ("fetched_bytes", "from other nodes", True),
)


def top(session: Session, *, interval_s: float, count: int | None) -> int:
    """Print what happened in each interval, `count` times, or until it is interrupted."""
    before = session.client.status()
    is_terminal = session.out.isatty() and not session.is_json
    try:
        for number in itertools.count(1):
            time.sleep(interval_s)
            now = session.client.status()
            if session.is_json:
                session.out.write(json.dumps(_document(before, now)) + "\n")
            else:
                session.out.write(_CLEAR if is_terminal else "" if number == 1 else "\n")
                session.lines(_lines(before, now))
            session.out.flush()
            if number == count:
                break
            before = now
    except KeyboardInterrupt:
        return 0
    return 0


def _document(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "now_ns": now["now_ns"],
        "per_second": rates(before, now),
        "clients": now["clients"],
        "used_bytes": now["used_bytes"],
        "tiering": now["tiering"],
    }


def rates(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """Each counter's growth a second between two documents of a node; of one that was started
    between them, since its start."""
    began_ns = before["now_ns"]
    counted = before["counters"]
    if before["started_ns"] != now["started_ns"]:
        began_ns, counted = now["started_ns"], {}
    passed_s = max(1e-3, (now["now_ns"] - began_ns) / 1e9)
    return {
        name: (value - counted.get(name, 0)) / passed_s for name, value in now["counters"].items()
    }


def _lines(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    up = age_text(now["now_ns"] - now["started_ns"])
    clients, used = now["clients"], size_text(now["used_bytes"])
    yield f"{escape(os.fsencode(now['store']))}: up {up}, {clients} clients, {used} used"
    yield ""
    per_second = rates(before, now)
    rows = [["", "a second", "since the start"]]
    for name, words, is_bytes in _RATES:
        total, rate = now["counters"][name], per_second[name]
        shown = [size_text(round(rate)), size_text(total)] if is_bytes else [
            f"{rate:,.1f}", f"{total:,}",
        ]  # fmt: skip
        rows.append([words, *shown])
    yield from table(rows, right=(1, 2))
    if now["tiering"] is not None:
        yield ""
        yield from tier_lines(now["tiering"])
