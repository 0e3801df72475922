"""Who has what, asked of the server for many files at once, and what a node says of itself."""

import logging
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from kvfs.meta.members import Member, Members
from kvfs.meta.redis import RedisEngine
from scripts.redis_rig import RedisServer
from tests.contract.meta_words import T0, digest, publication


@pytest.fixture
def engines(tmp_path: Path, server: RedisServer) -> Iterator[list[RedisEngine]]:
    cluster = secrets.token_hex(8)
    ids = [secrets.token_bytes(16) for _ in range(2)]
    made = [
        RedisEngine.join(tmp_path / node_id.hex(), server.url, cluster, node_id, now_ns=T0)
        for node_id in ids
    ]
    yield made
    for engine in made:
        engine.close()


def test_known_copies_many_files_are_as_fresh_as_the_feed(engines: list[RedisEngine]) -> None:
    a, b = engines
    a.publish([publication(n, b"f%d" % n) for n in range(1, 4)], T0)
    wanted = [digest(3), digest(1), digest(9)]
    b.catch_up()
    only_a = [{a.node_id}, {a.node_id}, set()]
    assert a.known_copies(wanted) == b.known_copies(wanted) == b.ask_copies(wanted) == only_a
    b.add_copy(publication(1, b"f1"))
    assert b.known_copies(wanted)[1] == {a.node_id, b.node_id}
    assert a.ask_copies(wanted)[1] == {a.node_id, b.node_id}
    a.catch_up()
    assert a.known_copies(wanted)[1] == {a.node_id, b.node_id}
    assert a.known_copies([]) == a.ask_copies([]) == []


def test_a_walk_over_own_blobs_shows_each_once_and_only_what_is_here(
    engines: list[RedisEngine],
) -> None:
    a, b = engines
    a.publish([publication(n, b"f%d" % n) for n in range(1, 8)], T0)
    b.catch_up()
    b.add_copy(publication(5, b"f5"))
    found, after = [], b""
    while page := a.own_blobs(after, 3):
        assert len(page) <= 3
        found += [blob.digest for blob in page]
        after = page[-1].digest
    assert found == sorted(digest(n) for n in range(1, 8))
    assert [blob.digest for blob in b.own_blobs(b"", 100)] == [digest(5)]
    a.end_copies([digest(5)], {b.node_id})
    [doomed] = [blob for blob in a.own_blobs(b"", 100) if blob.digest == digest(5)]
    assert doomed.references == 0


def test_who_is_leaving_says_so_with_its_lease(engines: list[RedisEngine]) -> None:
    a, b = (
        engine.members(Member(engine.node_id, "10.0.0.1:1", "", "host", "/store", n))
        for n, engine in enumerate(engines)
    )
    a.renew()
    assert not any(member.is_leaving for member in b.renew())
    me = next(member for member in a.renew() if member.node_id == engines[0].node_id)
    a.describe(replace(me, is_leaving=True))
    assert [m.is_leaving for m in a.renew() if m.node_id == me.node_id] == [True]
    seen = {member.node_id: member for member in b.renew()}
    assert seen[me.node_id].is_leaving and not seen[engines[1].node_id].is_leaving
    assert seen[me.node_id].endpoint == me.endpoint


def say(engine: RedisEngine, words: bytes) -> None:
    """A node of another version."""
    engine._server.renew_lease(words, 60.0, -1, is_new=False)


def members_of(engine: RedisEngine) -> Members:
    return engine.members(Member(engine.node_id, "10.0.0.1:1", "", "host", "/store", 5, "boot"))


def test_a_member_of_a_later_version_says_more(engines: list[RedisEngine]) -> None:
    a, b = engines
    words = ["10.0.0.2:1", "key", "host", "/store", 5, "boot", True]
    say(b, msgpack.packb([*words, {"new": [1]}, None]))
    [other] = [m for m in members_of(a).renew() if m.node_id == b.node_id]
    assert other == Member(b.node_id, *words)
    say(b, msgpack.packb(words[:5]))
    [other] = [m for m in members_of(a).renew() if m.node_id == b.node_id]
    assert other == Member(b.node_id, *words[:5])


@pytest.mark.parametrize(
    "words",
    [
        msgpack.packb(["10.0.0.2:1", "key"]),
        msgpack.packb([1, "key", "host", "/store", 5]),
        msgpack.packb({"address": "10.0.0.2:1"}),
        msgpack.packb(7),
        b"\xd9\x05ab",
        b"\xa1\xff",
    ],
)
def test_a_member_that_is_not_understood_ends_nobody(
    engines: list[RedisEngine],
    words: bytes,
    caplog: pytest.LogCaptureFixture,
    allow_warnings: list[str],
) -> None:
    allow_warnings.append("does not understand")
    a, b = engines
    members = members_of(a)
    asked: list[list[object]] = []
    renew = a._server.renew_lease
    a._server.renew_lease = lambda *w, **k: asked.append(renew(*w, **k)) or asked[-1]  # type: ignore[method-assign,assignment,func-returns-value]
    assert [m.node_id for m in members.renew()] == [a.node_id]
    say(b, words)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [m.node_id for m in members.renew()] == [a.node_id]
    assert [len(answer) for answer in asked] == [4, 4, 2, 2]  # nothing is asked for again
    assert len([r for r in caplog.records if b.node_id.hex() in r.getMessage()]) == 1
    say(b, b"")
    assert [m.node_id for m in members.renew()] == [a.node_id]
    members_of(b).renew()
    assert {m.node_id for m in members.renew()} == {a.node_id, b.node_id}
