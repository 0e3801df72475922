"""Sessions, tickets, backoff and pools: their bounds, and who goes first. No sockets, no clock."""

import threading
import time
from dataclasses import replace

import pytest

from kvfs.config import PeerLimits
from kvfs.errors import Unavailable
from kvfs.peers.backoff import Backoff
from kvfs.peers.messages import Range
from kvfs.peers.pool import Pool
from kvfs.peers.sessions import Session, Sessions
from kvfs.peers.tickets import TicketTable

LIMITS = PeerLimits(
    sessions_max=4, sessions_per_peer_max=3, session_idle_s=10.0,
    tickets_max=8, tickets_per_session_max=5, ticket_life_s=10.0,
    backoff_s_min=1.0, backoff_s_max=5.0,
)  # fmt: skip
RANGE = Range(b"d" * 16, 0, 1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _session(route: bytes, owner: str = "a", last_s: float = 0.0) -> Session:
    return Session(route, owner, b"n" * 16, 1, last_s)


# Sessions -----------------------------------------------------------------------------------------
def test_a_number_must_grow() -> None:
    session = _session(b"1")
    assert not session.is_replay(2)
    assert session.is_replay(2)
    assert session.is_replay(1)
    assert not session.is_replay(9)
    assert session.last_number == 9


def test_the_longest_idle_session_goes_when_there_are_too_many() -> None:
    sessions = Sessions(LIMITS)
    opened = [_session(b"%d" % index, owner=f"{index % 2}") for index in range(4)]
    assert all(sessions.open(session) for session in opened)
    sessions.use(opened[0], 1.0)
    opened[1].unanswered = 1
    assert sessions.open(_session(b"new", owner="c"))
    assert [opened[index].has_ended for index in range(4)] == [False, False, True, False]
    assert len(sessions) == 4


def test_a_peer_with_its_share_loses_a_session_of_its_own() -> None:
    sessions = Sessions(LIMITS)
    other = _session(b"o", owner="other")
    mine = [_session(b"%d" % index) for index in range(4)]
    assert sessions.open(other)
    assert all(sessions.open(session) for session in mine)
    assert not other.has_ended and mine[0].has_ended
    assert sessions.get(b"0") is None and sessions.get(b"3") is mine[3]


def test_a_session_too_many_is_refused_when_all_are_busy() -> None:
    sessions = Sessions(LIMITS)
    for index in range(4):
        session = _session(b"%d" % index, owner=f"{index}")
        session.unanswered = 1
        assert sessions.open(session)
    assert not sessions.open(_session(b"new", owner="new"))
    sessions.end(b"0")
    assert sessions.open(_session(b"new", owner="new"))


def test_idle_sessions_end_and_busy_ones_stay() -> None:
    sessions = Sessions(LIMITS)
    old, busy, young = _session(b"1"), _session(b"2"), _session(b"3", last_s=5.0)
    busy.unanswered = 1
    for session in (old, busy, young):
        sessions.open(session)
    assert sessions.end_idle(11.0) == 1
    assert (old.has_ended, busy.has_ended, young.has_ended) == (True, False, False)
    sessions.end(b"not there")
    assert len(sessions) == 2


# Tickets ------------------------------------------------------------------------------------------
def test_a_ticket_serves_once() -> None:
    table = TicketTable(LIMITS)
    tickets = table.give(b"s", [RANGE, replace(RANGE, offset=5)])
    assert tickets is not None and len(set(tickets)) == 2
    assert table.take(tickets[1]) == replace(RANGE, offset=5)
    assert table.take(tickets[1]) is None
    assert table.take(tickets[0]) == RANGE
    assert table.take(b"x" * 32) is None
    assert len(table) == 0


def test_a_ticket_expires() -> None:
    clock = Clock()
    table = TicketTable(LIMITS, clock)
    first = table.give(b"s", [RANGE])
    clock.now_s += 6
    second = table.give(b"s", [RANGE])
    clock.now_s += 6
    assert first is not None and second is not None
    assert table.take(first[0]) is None
    assert table.take(second[0]) == RANGE


def test_unused_tickets_are_bounded_for_each_session_and_in_all() -> None:
    clock = Clock()
    table = TicketTable(LIMITS, clock)
    first = table.give(b"1", [RANGE] * 5)
    assert first is not None
    assert table.give(b"1", [RANGE]) is None
    assert table.give(b"2", [RANGE] * 4) is None
    assert table.give(b"2", [RANGE] * 3) is not None
    table.take(first[0])
    assert table.give(b"1", [RANGE]) is not None
    clock.now_s += 11
    assert table.give(b"1", [RANGE] * 5) is not None


# Backoff ------------------------------------------------------------------------------------------
def test_failures_double_the_pause_up_to_a_bound() -> None:
    clock = Clock()
    backoff = Backoff(LIMITS, clock)
    pauses = []
    for _ in range(5):
        assert backoff.refusal_s(30.0) is None
        backoff.note_failure()
        pause_s = backoff.refusal_s(30.0)
        assert pause_s is not None
        pauses.append(pause_s)
        clock.now_s += pause_s
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_one_caller_asks_for_all_after_a_pause() -> None:
    clock = Clock()
    backoff = Backoff(LIMITS, clock)
    backoff.note_failure()
    clock.now_s += 1
    assert backoff.refusal_s(30.0) is None
    assert backoff.refusal_s(30.0) == 30.0
    backoff.note_answer()
    assert backoff.refusal_s(30.0) is None
    assert backoff.refusal_s(30.0) is None


def test_calls_that_fail_together_count_once() -> None:
    clock = Clock()
    backoff = Backoff(LIMITS, clock)
    for _ in range(4):
        backoff.note_failure()
    assert backoff.refusal_s(1.0) == 1.0


def test_a_probe_that_found_neither_lets_the_next_one_ask() -> None:
    clock = Clock()
    backoff = Backoff(LIMITS, clock)
    backoff.note_failure()
    clock.now_s += 1
    assert backoff.refusal_s(30.0) is None
    backoff.note_other()
    assert backoff.refusal_s(30.0) is None


# Pools --------------------------------------------------------------------------------------------
class Connection:
    def __init__(self) -> None:
        self.is_open = True
        self.usable = True

    def close(self) -> None:
        assert self.is_open
        self.is_open = False

    def is_usable(self) -> bool:
        return self.usable


def _soon() -> float:
    return time.monotonic() + 0.05


def test_a_connection_is_used_again_unless_its_peer_closed_it() -> None:
    pool: Pool[Connection] = Pool(2, "peer")
    first, was_kept = pool.take(Connection, _soon())
    assert not was_kept
    pool.put(first)
    assert pool.take(Connection, _soon()) == (first, True)
    pool.put(first)
    first.usable = False
    second, was_kept = pool.take(Connection, _soon())
    assert second is not first and not was_kept and not first.is_open


def test_more_than_fit_wait_and_are_refused_at_the_deadline() -> None:
    pool: Pool[Connection] = Pool(1, "peer")
    first, _ = pool.take(Connection, _soon())
    with pytest.raises(Unavailable, match="peer: all 1 are in use"):
        pool.take(Connection, _soon())
    taken: list[Connection] = []
    waiter = threading.Thread(
        target=lambda: taken.append(pool.take(Connection, time.monotonic() + 20)[0])
    )
    waiter.start()
    pool.put(first)
    waiter.join(20)
    assert taken == [first]


def test_one_that_cannot_be_made_keeps_no_place() -> None:
    def fail() -> Connection:
        raise Unavailable("away")

    pool: Pool[Connection] = Pool(1, "peer")
    with pytest.raises(Unavailable, match="away"):
        pool.take(fail, _soon())
    first, _ = pool.take(Connection, _soon())
    pool.drop(first)
    assert not first.is_open
    assert pool.take(Connection, _soon())[0].is_open


def test_a_closed_pool_leaves_nothing_open() -> None:
    pool: Pool[Connection] = Pool(3, "peer")
    idle, _ = pool.take(Connection, _soon())
    used, _ = pool.take(Connection, _soon())
    late = Connection()

    def make_late() -> Connection:
        pool.close(abort=aborted.append)
        return late

    aborted: list[Connection] = []
    pool.put(idle)
    idle.usable = True
    pool.drop_idle()
    with pytest.raises(Unavailable, match="closed"):
        pool.take(make_late, _soon())
    assert aborted == [used] and used.is_open
    pool.put(used)
    assert not idle.is_open and not used.is_open and not late.is_open
    with pytest.raises(Unavailable, match="closed"):
        pool.take(Connection, _soon())
