"""Directory entries asked of the server in one go: what is sent, and which answers are taken."""

import struct

import pytest
import redis

from kvfs.meta.bulk import DirentsQuestion, by_directory
from kvfs.meta.exchange import Unexpected
from kvfs.meta.records import NO_DIRENT

PREFIX, EPOCH = b"{kvfs:c}:", b"e" * 32
FIRST = b"$32\r\n" + EPOCH + b"\r\n"
KEYS = [struct.pack(">Q", n % 3) + b"name%d" % n for n in range(40)]
GROUPS = by_directory(KEYS)
# Three of them hold what separates words in an answer.
VALUES = {key: struct.pack("<QQ", n + 1, 5) for n, key in enumerate(KEYS)} | {
    KEYS[7]: b"$-1\r\n$-1\r\n\r\n-ER.",
    KEYS[8]: b"\r\n$16\r\n*2\r\n\0\0\0\0\0",
    KEYS[9]: struct.pack("<QQ", 0x3024, 5),  # as the beginning of a string of another length
}


def question() -> DirentsQuestion:
    asked = DirentsQuestion(GROUPS, PREFIX, EPOCH)
    list(asked.pack())
    return asked


def answer(missing: frozenset[bytes] = frozenset()) -> bytes:
    parts = [FIRST]
    for keys in GROUPS.values():
        parts.append(b"*%d\r\n" % len(keys))
        parts += [b"$-1\r\n" if k in missing else b"$16\r\n%b\r\n" % VALUES[k] for k in keys]
    return b"".join(parts)


@pytest.mark.parametrize("tails", [(b"",), (b"", b"longer")])
@pytest.mark.parametrize("count", [1, 40, 1000])
def test_commands_are_as_the_library_packs_them(count: int, tails: tuple[bytes, ...]) -> None:
    keys = [struct.pack(">Q", n % 7) + b"%04d%b" % (n, tails[n % len(tails)]) for n in range(count)]
    groups = by_directory(keys)
    commands = [("GET", PREFIX + b"epoch")] + [
        ("HMGET", PREFIX + b"d" + group, *(key[8:] for key in names))
        for group, names in groups.items()
    ]
    expected = b"".join(redis.Connection().pack_commands(commands))
    assert sorted(key for names in groups.values() for key in names) == sorted(keys)
    assert b"".join(DirentsQuestion(groups, PREFIX, EPOCH).pack()) == expected


@pytest.mark.parametrize("missing", [frozenset(), frozenset(KEYS[::5]), frozenset(KEYS)])
def test_an_answer_counts_once_it_is_whole(missing: frozenset[bytes]) -> None:
    whole, asked = answer(missing), question()
    for end in range(len(whole)):
        assert asked.read(bytearray(whole[:end])) is None
    ordered = [key for keys in GROUPS.values() for key in keys]
    assert asked.read(bytearray(whole)) == [
        NO_DIRENT if key in missing else VALUES[key] for key in ordered
    ]


@pytest.mark.parametrize(
    "other",
    [
        b"-NOAUTH Authentication required.\r\n",
        b"$-1\r\n" + answer()[len(FIRST) :],
        answer().replace(EPOCH, b"f" * 32),
        FIRST + b"-MOVED 3999 127.0.0.1:6381\r\n",
        answer()[:-23] + b"-WRONGTYPE Operation against a key\r\n",
        answer()[:-23] + b"$17\r\n",
        answer() + b"*1\r\n",
    ],
    ids=["refused", "emptied", "another epoch", "moved", "an error at the end", "long", "more"],
)
def test_any_other_answer_is_left_to_the_library(other: bytes) -> None:
    asked = question()
    with pytest.raises(Unexpected):
        asked.read(bytearray(other))
