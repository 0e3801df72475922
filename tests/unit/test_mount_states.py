"""The table of opens: every state with every access, and the exceptions for repeated requests."""

import pytest

from mount.states import Access, Opening, State, decide_open, keeps_cache

TABLE = [
    (State.IDLE, Access.READ, Opening.OPEN),
    (State.IDLE, Access.WRITE, Opening.ADOPT),
    (State.IDLE, Access.TRUNCATE, Opening.EMPTY),
    (State.READ, Access.READ, Opening.JOIN),
    (State.READ, Access.WRITE, Opening.MOVE),
    (State.READ, Access.TRUNCATE, Opening.MOVE),
    (State.WRITE, Access.READ, Opening.JOIN),
    (State.WRITE, Access.WRITE, Opening.JOIN),
    (State.WRITE, Access.TRUNCATE, Opening.EMPTY),
    (State.STAGED, Access.READ, Opening.JOIN),
    (State.STAGED, Access.WRITE, Opening.JOIN),
    (State.STAGED, Access.TRUNCATE, Opening.EMPTY),
    (State.OLD, Access.READ, Opening.STALE),
    (State.OLD, Access.WRITE, Opening.STALE),
    (State.OLD, Access.TRUNCATE, Opening.STALE),
]


def decide(
    state: State, access: Access, *, is_open: bool = True, repeated: bool = False,
    awaited: bool = False,
) -> Opening:  # fmt: skip
    return decide_open(state, access, is_open=is_open, is_repeated=repeated, is_awaited=awaited)


@pytest.mark.parametrize(("state", "access", "opening"), TABLE)
def test_the_table(state: State, access: Access, opening: Opening) -> None:
    assert decide(state, access) is opening


def test_the_table_is_whole() -> None:
    assert {(state, access) for state, access, _ in TABLE} == {
        (state, access) for state in State for access in Access
    }


@pytest.mark.parametrize("why", [{"repeated": True}, {"awaited": True}])
def test_no_new_version_for_a_request_that_was_sent_back(why: dict[str, bool]) -> None:
    assert decide(State.READ, Access.WRITE, **why) is Opening.JOIN
    assert decide(State.READ, Access.TRUNCATE, **why) is Opening.EMPTY
    for state, access, opening in TABLE:
        if opening not in (Opening.MOVE, Opening.STALE):
            assert decide(state, access, **why) is opening


def test_a_repeated_read_gets_an_old_version_that_someone_has_open() -> None:
    assert decide(State.OLD, Access.READ, repeated=True) is Opening.JOIN
    assert decide(State.OLD, Access.READ, repeated=True, is_open=False) is Opening.STALE
    assert decide(State.OLD, Access.WRITE, repeated=True) is Opening.STALE
    assert decide(State.OLD, Access.READ, awaited=True) is Opening.STALE


def test_pages_are_kept_only_when_they_are_of_the_same_bytes() -> None:
    for opening in Opening:
        assert keeps_cache(opening, is_same_digest=True) is (
            opening in (Opening.OPEN, Opening.ADOPT, Opening.JOIN)
        )
        assert keeps_cache(opening, is_same_digest=False) is (opening is Opening.JOIN)
