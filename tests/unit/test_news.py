"""The feed asked for in one go: what is sent, which answers are taken, and what they say."""

import pytest
import redis

from kvfs.config import CLUSTER_NEWS_ENTRIES
from kvfs.meta.exchange import Unexpected
from kvfs.meta.journal import Point
from kvfs.meta.news import FEED_END, News, NewsAnswer, NewsQuestion, read_news

PREFIX, EPOCH = b"{kvfs:c}:", b"e" * 32
NODE, MARK, NEXT = b"n" * 16, b"m\r\n$3\r\n" + bytes(9), b"k" * 16


def question(after: int = 7) -> NewsQuestion:
    return NewsQuestion(PREFIX, after)


def string(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def entry(number: int, *fields: bytes) -> bytes:
    return b"*2\r\n%b*%d\r\n%b" % (
        string(b"%d-0" % number), len(fields), b"".join(map(string, fields))
    )  # fmt: skip


def answer(*entries: bytes, sequence: bytes = b"8") -> bytes:
    counters = (EPOCH, b"3", sequence, NEXT)
    return b"".join(
        (b"*4\r\n", *map(string, counters), b"*%d\r\n" % len(entries), *entries)
    )  # fmt: skip


SEEN = entry(7, b"", NODE + MARK + b"before")
NEW = entry(8, b"", NODE + NEXT + b"news\r\n-ERR")


@pytest.mark.parametrize("after", [0, 7, FEED_END])
def test_commands_are_as_the_library_packs_them(after: int) -> None:
    keys = [PREFIX + name for name in (b"epoch", b"inodes", b"seq", b"mark")]
    feed = ("XRANGE", PREFIX + b"feed", f"{after}-0", "+", "COUNT", CLUSTER_NEWS_ENTRIES + 1)
    expected = b"".join(redis.Connection().pack_commands([("MGET", *keys), feed]))
    assert b"".join(question(after).pack()) == expected


def test_an_answer_counts_once_it_is_whole() -> None:
    whole, asked = answer(SEEN, NEW), question()
    for end in range(len(whole)):  # in as many parts as it has bytes, and in one
        assert asked.read(bytearray(whole[:end])) is None
    found = asked.read(bytearray(whole))
    assert found == question().read(bytearray(whole))
    assert found == NewsAnswer(
        [EPOCH, b"3", b"8", NEXT],
        [
            (b"7-0", {b"": NODE + MARK + b"before"}),
            (b"8-0", {b"": NODE + NEXT + b"news\r\n-ERR"}),
        ],
    )


@pytest.mark.parametrize(
    "other",
    [
        b"-NOAUTH Authentication required.\r\n",
        answer()[: -len(b"*0\r\n")] + b"-WRONGTYPE Operation against a key\r\n",
        answer(b"*2\r\n$3\r\n7-0\r\n-ERR no\r\n"),
        answer(b":5\r\n"),
        answer(b"*1\r\n$3\r\n7-0\r\n"),
        answer(entry(7, b"", b"one", b"two")),
        b"*1\r\n$-1\r\n*0\r\n",
        b"*x\r\n",
        answer()[: -len(b"*0\r\n")] + b"*-1\r\n",
        answer() + b"*0\r\n",
    ],
    ids="refused,no stream,error within,number,no fields,odd,few,no number,no array,more".split(
        ","
    ),
)
def test_any_other_answer_is_left_to_the_library(other: bytes) -> None:
    with pytest.raises(Unexpected):
        question().read(bytearray(other))


def read(raw: bytes, after: int = 7) -> News | None:
    found = question(after).read(bytearray(raw))
    assert found is not None
    return read_news(found, after, EPOCH)


def test_what_it_says() -> None:
    news = read(answer(SEEN, NEW))
    at = Point(8, NEXT)
    assert news == News(EPOCH, 3, at, MARK, ((at, NODE, b"news\r\n-ERR"),))
    assert news.continues(Point(7, MARK)) and not news.continues(Point(7, NEXT))
    strange = entry(9, b"x", b"y")
    assert read(answer(SEEN, NEW, strange)) == news  # what others put there is passed over
    came_between = read(answer(SEEN, NEW, sequence=b"7"))
    assert came_between is not None and came_between.last == at


def test_lost_counters_are_not_read_past() -> None:
    assert read(answer(sequence=b"")) is None
    assert read(answer(sequence=b"nine")) is None
    assert read_news(NewsAnswer([EPOCH, b"3", b"8", NEXT], None), 7, EPOCH) is None
    of_another = answer().replace(EPOCH, b"f" * 32)
    assert read(of_another) == News(b"f" * 32, 3, Point(8, NEXT), b"", ())


def test_arrays_without_an_end_are_not_followed() -> None:
    with pytest.raises(Unexpected):
        question().read(bytearray(b"*4\r\n" + string(EPOCH) * 4 + b"*1\r\n" * 100_000))
