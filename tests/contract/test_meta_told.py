"""Names that the feed tells a node of before it asks: found without a question, and never as they
were before a change that was heard."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import pytest
import redis

from kvfs.errors import Unavailable
from kvfs.meta.contract import ROOT_INO
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer
from tests.contract.meta_words import FILE, T0, digest, publication


@pytest.fixture
def engines(tmp_path: Path, server: RedisServer) -> Iterator[list[RedisEngine]]:
    name = secrets.token_hex(8)
    made = [
        RedisEngine.join(tmp_path / str(n), server.url, name, secrets.token_bytes(16), now_ns=T0)
        for n in range(3)
    ]
    yield made
    for engine in made:
        engine.close()


def count_questions(engine: RedisEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries the engine asks the server for, each time that it does."""
    asked: list[int] = []
    dirents = engine._server.dirents
    monkeypatch.setattr(
        engine._server,
        "dirents",
        lambda groups: asked.append(sum(map(len, groups.values()))) or dirents(groups),
    )
    return asked


def test_what_another_node_stores_is_found_without_a_question(
    engines: list[RedisEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = engines
    a.publish([publication(1, b"first")], T0)
    b.catch_up()
    asked = count_questions(b, monkeypatch)
    a.publish([publication(2, b"f"), publication(3, b"g")], T0)
    a.make(ROOT_INO, b"open", FILE, 0, 0, T0)  # of no size yet
    b.catch_up()
    assert b.sizes([b"first", b"f", b"g"]) == [101, 102, 103]
    assert asked == []
    assert b.sizes([b"open", b"missing", b"f"]) == [None, None, 102]
    assert asked == [2]


def test_each_change_of_a_name_is_seen(engines: list[RedisEngine]) -> None:
    a, b, c = engines
    a.publish([publication(1, b"f"), publication(2, b"g"), publication(3, b"h")], T0)
    a.unlink(ROOT_INO, b"f", T0)
    a.rename(ROOT_INO, b"h", ROOT_INO, b"g", T0)
    b.catch_up()  # hears all of it at once
    assert b.sizes([b"f", b"g", b"h"]) == [None, 103, None]
    a.publish([publication(4, b"f")], T0)
    b.catch_up()  # what was missing is there; nobody asked for it since
    c.catch_up()
    c.publish([publication(5, b"f")], T0)
    b.catch_up()
    assert b.sizes([b"f"]) == [105]
    c.publish([publication(6, b"f")], T0)
    c.unlink(ROOT_INO, b"g", T0)
    b.catch_up()
    assert b.sizes([b"f", b"g"]) == [106, None]
    a.publish([publication(7, b"unasked"), publication(8, b"moved")], T0)
    b.catch_up()
    a.catch_up()
    c.catch_up()
    c.unlink(ROOT_INO, b"unasked", T0)
    c.rename(ROOT_INO, b"moved", ROOT_INO, b"new", T0)
    b.catch_up()
    assert b.sizes([b"unasked", b"moved", b"new"]) == [None, None, 108]


def test_an_own_change_between_those_of_others_stands(
    engines: list[RedisEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.known.CLUSTER_RECORDS_CACHED_MAX", 1)  # it is soon forgotten
    a, b, _ = engines
    a.publish([publication(1, b"f"), publication(1, b"g"), publication(1, b"h")], T0)
    b.publish([publication(2, b"f")], T0)  # before it heard of that
    b.unlink(ROOT_INO, b"g", T0)
    b.publish([publication(2, b"other"), publication(2, b"more")], T0)
    a.catch_up()
    a.publish([publication(3, b"h")], T0)
    b.catch_up()
    for engine in (b, a):
        assert engine.sizes([b"f", b"g", b"h"]) == [102, None, 103]
        engine.catch_up()


def test_a_feed_that_is_heard_by_half_tells_nothing(
    engines: list[RedisEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.news.CLUSTER_NEWS_ENTRIES", 2)
    a, b, _ = engines
    a.publish([publication(1, b"f")], T0)
    for number in (2, 3, 4):
        a.publish([publication(number, b"f")], T0)
    news, after = b._server.news, b._seen.sequence

    def lose_the_second(start: int) -> object:
        if start != after:
            raise Unavailable("the metadata server does not answer")
        return news(start)

    with monkeypatch.context() as lagging:
        lagging.setattr(b._server, "news", lose_the_second)
        with pytest.raises(Unavailable):
            b.catch_up()
        assert b.sizes([b"f"]) == [104]  # asked for, and not as the first half says
    a.publish([publication(5, b"f")], T0)
    b.catch_up()
    assert b.sizes([b"f"]) == [105]


def test_what_a_server_lost_is_not_told_any_more(
    engines: list[RedisEngine], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = engines
    a.publish([publication(1, b"f"), publication(2, b"g")], T0)
    b.catch_up()
    with redis.Redis(port=server.port) as client:
        client.flushall()
    with pytest.raises(Unavailable, match="was emptied"):
        b.catch_up()
    assert b.sizes([b"f", b"g"]) == [None, None]
    with pytest.raises(Unavailable, match="was emptied"):
        a.catch_up()
    while a.refill_more(T0) or a.recheck_more():
        pass
    asked = count_questions(b, monkeypatch)
    b.catch_up()
    assert b.sizes([b"f", b"g"]) == [101, 102]
    assert asked == []  # they were told again


def test_a_node_that_is_cut_off_serves_what_it_was_told(
    engines: list[RedisEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = engines
    b.sizes([b"x"])
    a.publish([publication(1, b"f")], T0)
    b.catch_up()

    def silent(*_: object) -> Never:
        raise Unavailable("the metadata server does not answer")

    for name in ("dirents", "values", "members", "news"):
        monkeypatch.setattr(b._server, name, silent)
    assert b.sizes([b"f"]) == [101]


def test_what_is_told_is_bounded_and_pushes_out_nothing_that_was_asked_for(
    engines: list[RedisEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.meta.known.CLUSTER_NAMES_TOLD_MAX", 3)
    a, b, _ = engines
    a.publish([publication(9, b"asked")], T0)
    b.catch_up()
    assert b.sizes([b"asked"]) == [109]
    for number in range(8):
        a.publish([publication(number, b"%d" % number)], T0)
    b.catch_up()
    asked = count_questions(b, monkeypatch)
    assert b.sizes([b"asked", b"7", b"6", b"5"]) == [109, 107, 106, 105]
    assert asked == []
    assert b.sizes([b"0", b"4"]) == [100, 104]
    assert asked == [2]
    assert [inode and inode.digest for inode in b.resolve([b"0", b"7"])] == [digest(0), digest(7)]
