"""Lines for a person and JSON documents for a program, from what the shell found.

Pure but for `write_json`. Names come from `kvfs.names.escape`, which never break a line.
"""

import json
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any

from kvfs.names import is_printable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECOND_NS = 10**9
_NAMES_SHOWN = 8
_AGE_STEPS = ((86_400 * 365, "y"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def snippet(text: str, length: int) -> str:
    """The first `length` characters of a text on one line, white space as single spaces."""
    line = " ".join(text.split())
    line = "".join(c if is_printable(c) else "\N{REPLACEMENT CHARACTER}" for c in line)
    return line if len(line) <= length else line[: length - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def size_text(size_bytes: int) -> str:
    """`16 MiB`: at most three digits before the unit, one after the point where it says more."""
    value = float(size_bytes)
    for unit in _UNITS:
        if abs(value) < 1023.95 or unit == _UNITS[-1]:
            break
        value /= 1024
    number = f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"
    return f"{number.removesuffix('.0')} {unit}"


def count_text(count: int, noun: str) -> str:
    """`1 chunk`, `12,500 chunks`."""
    plural = noun + ("es" if noun.endswith(("x", "s")) else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def names_text(names: Sequence[str], count: int) -> str:
    """`a, b`, or `a, b ...` when `count` is more than are shown."""
    shown = names[:_NAMES_SHOWN]
    return ", ".join(shown) + (" ..." if count > len(shown) else "")


def age_text(age_ns: int) -> str:
    """How long ago in its largest unit: `3 min`; what lies ahead (another clock) is `0 s`."""
    seconds = max(age_ns, 0) // _SECOND_NS
    for length, unit in _AGE_STEPS:
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return "0 s"


def duration_text(seconds: float) -> str:
    """`3.2 ms`, `1.4 s`: two digits that count."""
    value, unit = (seconds * 1e3, "ms") if seconds < 1 else (seconds, "s")
    return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"


def time_text(time_ns: int) -> str | None:
    """RFC 3339 in UTC to the microsecond; None when there is no time (0) or no such year."""
    if time_ns == 0:
        return None
    try:
        moment = datetime.fromtimestamp(time_ns // _SECOND_NS, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    moment = moment.replace(microsecond=time_ns % _SECOND_NS // 1000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def short_time_text(time_ns: int) -> str:
    """`2026-11-29 15:04` in local time, as in `ls -l`."""
    try:
        return datetime.fromtimestamp(time_ns // _SECOND_NS).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def mode_text(mode: int) -> str:
    """`-rw-r--r--`."""
    return stat.filemode(mode)


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> Iterator[str]:
    """Rows as aligned lines, two spaces between columns; the columns of `right` to the right."""
    aligned = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        cells = [
            cell.rjust(width) if index in aligned else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def facts(pairs: Iterable[tuple[str, str]], indent: str = "") -> Iterator[str]:
    """`name   value` lines, the values in one column."""
    listed = list(pairs)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        yield f"{indent}{name.ljust(width)}  {value}".rstrip()


def write_json(
    out: IO[str], document: Mapping[str, Any], items: tuple[str, Iterable[Any]] | None = None
) -> None:
    """Write one JSON document and a newline.

    `items` is a last member whose list is written as it is found, so that a listing of any length
    needs no memory. Bytes are no JSON: the caller has escaped them.
    """
    if items is None:
        json.dump(document, out, indent=2)
        out.write("\n")
        return
    name, values = items
    out.write("{\n")
    for key, value in document.items():
        out.write(f"  {json.dumps(key)}: {json.dumps(value)},\n")
    out.write(f"  {json.dumps(name)}: [")
    separator = "\n"
    for value in values:
        out.write(f"{separator}    {json.dumps(value)}")
        separator = ",\n"
    out.write("]\n}\n" if separator == "\n" else "\n  ]\n}\n")
