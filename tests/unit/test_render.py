"""What the shell prints is unambiguous, one line a thing, and valid JSON."""

import io
import json

import pytest

from kvfs.names import escape
from kvfs.shell.render import (
    age_text,
    count_text,
    duration_text,
    facts,
    names_text,
    size_text,
    snippet,
    table,
    time_text,
    write_json,
)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (b"kv/m@f/ab", "kv/m@f/ab"),
        ("Ünï/漢字".encode(), "Ünï/漢字"),
        (b"a\nb\tc", "a\\x0ab\\x09c"),
        (b"\xff\xfe", "\\xff\\xfe"),
        (b"back\\slash", "back\\\\slash"),
        (b"\x1b[31mred", "\\x1b[31mred"),
        ("right\u202eleft".encode(), "right\\xe2\\x80\\xaeleft"),
    ],
)
def test_names_are_shown_printable(name: bytes, shown: str) -> None:
    assert escape(name) == shown


def test_two_names_never_look_the_same() -> None:
    names = [b"\xff", b"\\xff", b"\\\\xff", "ÿ".encode(), b"\n", b"\\x0a", b"\\n"]
    assert len({escape(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (16 * 2**20, "16 MiB"),
        (2**20 - 1, "1 MiB"),
        (100 * 2**30 + 2**29, "100 GiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_sizes(size_bytes: int, shown: str) -> None:
    assert size_text(size_bytes) == shown


def test_counts_and_ages() -> None:
    assert count_text(1, "chunk") == "1 chunk"
    assert count_text(12_500, "chunk") == "12,500 chunks"
    assert count_text(2, "prefix") == "2 prefixes"
    second = 10**9
    assert [age_text(n * second) for n in (-5, 0, 59, 60, 3_600, 90_000, 86_400 * 800)] == [
        "0 s",
        "0 s",
        "59 s",
        "1 min",
        "1 h",
        "1 d",
        "2 y",
    ]


def test_of_many_names_the_first_are_shown() -> None:
    assert names_text(["a", "b"], 2) == "a, b"
    assert names_text(["a", "b"], 3) == "a, b ..."
    assert names_text([*"abcdefghi"], 9) == "a, b, c, d, e, f, g, h ..."


def test_times_are_rfc_3339() -> None:
    assert time_text(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123456Z"
    assert time_text(0) is None
    assert time_text(2**63) is None or time_text(2**63).endswith("Z")
    assert time_text(10**30) is None


def test_durations() -> None:
    shown = [duration_text(seconds) for seconds in (0, 0.0032, 0.0123, 0.9, 1.44, 100)]
    assert shown == ["0.0 ms", "3.2 ms", "12 ms", "900 ms", "1.4 s", "100 s"]


def test_snippets_are_one_line() -> None:
    assert snippet("You are\n\ta  helpful", 60) == "You are a helpful"
    assert snippet("x" * 61, 60) == "x" * 59 + "…"
    assert snippet("\x00a\x1b", 60) == "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}"


def test_tables_align_and_do_not_trail_blanks() -> None:
    assert list(table([["a", "size"], ["long", "1"]], right=(1,))) == ["a     size", "long     1"]
    assert list(table([["long", ""], ["a", "b"]])) == ["long", "a     b"]
    assert list(table([])) == []
    assert list(facts([("a", "1"), ("bcd", "")])) == ["a    1", "bcd"]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_streamed_document_is_valid_json(count: int) -> None:
    out = io.StringIO()
    items = ({"n": n, "text": 'a "quote"\n'} for n in range(count))
    write_json(out, {"model": "m\udcff"}, ("items", items))
    document = json.loads(out.getvalue())
    assert [item["n"] for item in document["items"]] == list(range(count))
    assert document["model"] == "m\udcff"
    assert out.getvalue().endswith("}\n")


def test_a_plain_document_is_valid_json() -> None:
    out = io.StringIO()
    write_json(out, {"a": [1, None]})
    assert json.loads(out.getvalue()) == {"a": [1, None]}
