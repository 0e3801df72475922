"""How far a prompt hits, and why no further."""

from collections.abc import Sequence

import pytest

from kvfs.errors import InvalidInput
from kvfs.shell.explain import End, Explanation, best_first, explain_prompt, read_tokens
from kvfs.shell.namespaces import find_namespaces
from tests.fake_client import FakeClient, tokens_digest

SPACE = b"kv/m@0123456789abcdef0123456789abcdef"
PROMPT = list(range(1000, 1000 + 1300))  # five chunks of 256, and 20 tokens


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def store(
    client: FakeClient,
    names: str = "abcde",
    tokens: Sequence[int] | None = PROMPT,
    **options: object,
) -> list[bytes]:
    paths = []
    parent = None
    for number, name in enumerate(names):
        span = (number * 256, number * 256 + 256)
        paths.append(
            client.add_chunk(SPACE, name, parent, span, tokens=tokens, **options)  # type: ignore[arg-type]
        )
        parent = name
    return paths


def explain(client: FakeClient, tokens: Sequence[int] = PROMPT) -> Explanation:
    (space,) = find_namespaces(client)
    return explain_prompt(client, space, tokens, tokens_digest)


def test_a_cached_prompt(client: FakeClient) -> None:
    store(client)
    found = explain(client)
    assert (found.hit_tokens, found.end, found.chunk_tokens) == (1280, End.COMPLETE, 256)
    assert [p.token_start for p in found.cached] == [0, 256, 512, 768, 1024]
    assert explain(client, PROMPT[:1280]).end is End.COMPLETE


def test_a_shorter_prompt_ends_inside_a_chunk(client: FakeClient) -> None:
    store(client)
    found = explain(client, PROMPT[:300])
    assert (found.hit_tokens, found.end) == (256, End.COMPLETE)


def test_another_prompt_shares_what_it_shares(client: FakeClient) -> None:
    store(client)
    found = explain(client, [*PROMPT[:600], *range(700)])
    assert (found.hit_tokens, found.end, found.is_searched) == (512, End.NO_CHUNK, True)
    assert found.beyond == ()


def test_a_prompt_that_nothing_starts(client: FakeClient) -> None:
    store(client)
    found = explain(client, list(range(512)))
    assert (found.hit_tokens, found.end, found.cached) == (0, End.NO_CHUNK, ())


def test_a_gap_and_what_waits_behind_it(client: FakeClient) -> None:
    paths = store(client)
    client.remove(paths[1])
    found = explain(client)
    assert (found.hit_tokens, found.end) == (256, End.GAP)
    assert [p.token_start for p in found.beyond] == [512, 768, 1024]


def test_a_gap_behind_which_another_prompt_waits_is_not_ours(client: FakeClient) -> None:
    paths = store(client, tokens=[*PROMPT[:256], *range(2000)])
    client.remove(paths[1])
    found = explain(client)
    assert (found.hit_tokens, found.end, found.beyond) == (256, End.NO_CHUNK, ())


def test_a_missing_shard_ends_the_hit_and_is_named(client: FakeClient) -> None:
    store(client)
    paths = store(client, part=(0, 1))
    client.remove(paths[2])
    found = explain(client)
    assert (found.hit_tokens, found.end) == (512, End.INCOMPLETE)
    assert found.missing_parts == {(0, 1)}
    assert len(found.cached) == 5


def test_chunks_without_token_ids_cannot_be_compared(client: FakeClient) -> None:
    store(client, tokens=None)
    assert explain(client).end is End.TOKENS_UNKNOWN


def test_equal_tokens_under_other_keys_are_followed_too(client: FakeClient) -> None:
    store(client, "a")
    store(client, "vwxyz")
    store(client, "q")
    found = explain(client)
    assert (found.hit_tokens, found.end) == (1280, End.COMPLETE)


def test_the_best_fingerprint_comes_first(client: FakeClient) -> None:
    store(client, "ab")
    other = SPACE[:-1] + b"0"
    client.add_chunk(other, "a", None, (0, 256), tokens=PROMPT)
    spaces = find_namespaces(client)
    found = [explain_prompt(client, space, PROMPT, tokens_digest) for space in spaces]
    assert [e.hit_tokens for e in best_first(found)] == [512, 256]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("[1, 2, 3]", [1, 2, 3]),
        ("1 2\n3", [1, 2, 3]),
        ("1,2, 3,", [1, 2, 3]),
        ("0 4294967295", [0, 2**32 - 1]),
    ],
)
def test_token_files(text: str, tokens: list[int]) -> None:
    assert read_tokens(text, "f") == tokens


@pytest.mark.parametrize(
    "text", ["", "[]", "[1, true]", "[1.5]", "[-1]", "4294967296", "a b", "[1", "{}", "[" * 99_999]
)
def test_token_files_that_are_none(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"ids\.txt"):
        read_tokens(text, "ids.txt")
