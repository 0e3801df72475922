"""Real vLLM on a real node: hits after a restart, every way a chunk can be bad, deaths on both
sides, preemption and concurrency. Outputs are compared, token by token, with an engine that has no
connector."""

import os
from collections.abc import Mapping

import pytest

from kvfs.names import parse_chunk_path
from scripts.memory_rig import drop_page_cache
from tests.engines import EngineProcess, Site, StartEngine, prompt_of
from tests.processes import wait_until

pytestmark = pytest.mark.timeout(1500)  # an engine starts in 10 s, or minutes on a busy machine

CHUNK_TOKENS = 256
CHUNKS = 4
PROMPT_TOKENS = CHUNKS * CHUNK_TOKENS
ANSWER_TOKENS = 8
LONG_ANSWER_TOKENS = 40


def prompt(seed: int, tokens: int = PROMPT_TOKENS + 1) -> list[int]:
    return prompt_of(tokens, seed)


# The answer fills one more chunk.
GROWING = prompt(0, PROMPT_TOKENS + CHUNK_TOKENS - 6)
SHARED = prompt(100, 3 * CHUNK_TOKENS)
# Prompts that begin alike and go on apart.
FAMILY = [SHARED + prompt(101 + i, 60 + 40 * i) for i in range(6)]


Expected = Mapping[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def expected(start_engine: StartEngine) -> Expected:
    """What an engine without any connector answers."""
    engine = start_engine(None)
    prompts = [*(prompt(seed) for seed in range(4)), GROWING, *FAMILY]
    answers = {tuple(p): engine.ask_one(p, ANSWER_TOKENS).tokens for p in prompts}
    engine.stop()
    return answers


@pytest.fixture(scope="module")
def engine(site: Site, start_engine: StartEngine) -> EngineProcess:
    """An engine that serves from the site for as long as the tests of this module run."""
    return start_engine(site.store, settings={"kvfs.deadline_s": 3})


def test_a_restarted_engine_answers_from_the_files_of_a_killed_one(
    site: Site, start_engine: StartEngine, request: pytest.FixtureRequest, expected: Expected
) -> None:
    answer = expected[tuple(GROWING)]
    before = site.paths()
    first = start_engine(site.store)
    cold = first.ask_one(GROWING, ANSWER_TOKENS)
    assert (cold.tokens, cold.cached) == (answer, 0)
    first.settle()
    # The chunks of the prompt, and the one that filled while the answer was written.
    whole = site.paths(of=before)
    assert len(whole) == CHUNKS + 1

    first.begin(prompt(4, 3900), 1)
    wait_until(lambda: any(site.store.glob("staging/*")) or len(site.paths(of=before)) > CHUNKS + 1)
    first.kill()
    wait_until(lambda: not any(site.store.glob("staging/*")))
    site.verify()

    drop_page_cache()
    engine: EngineProcess = request.getfixturevalue("engine")
    warm = engine.ask_one(GROWING, ANSWER_TOKENS)
    assert (warm.tokens, warm.cached) == (answer, PROMPT_TOKENS)
    # A prompt that ends with its last chunk: all is loaded, and its last token computed again.
    engine.forget()
    known = PROMPT_TOKENS + CHUNK_TOKENS - len(GROWING)
    again = engine.ask_one(GROWING + list(answer[:known]), ANSWER_TOKENS - known)
    assert again.tokens == answer[known:]
    assert again.cached in (PROMPT_TOKENS + CHUNK_TOKENS, PROMPT_TOKENS + CHUNK_TOKENS - 1)
    engine.settle()
    counted = engine.metrics()
    assert counted["vllm:kvfs_loaded_chunks"] == CHUNKS + CHUNKS + 1
    assert counted["vllm:kvfs_loaded_tokens"] == PROMPT_TOKENS + PROMPT_TOKENS + CHUNK_TOKENS
    assert counted["vllm:kvfs_saved_chunks"] == 0


# Each takes the files of the prompt and spoils the third chunk; whether the node can tell.
def flip(site: Site, path: bytes) -> None:
    blob = site.blob_of(path)
    with open(blob, "r+b") as file:
        file.seek(blob.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def truncate(site: Site, path: bytes) -> None:
    blob = site.blob_of(path)
    os.truncate(blob, blob.stat().st_size - 4096)


def empty_blob(site: Site, path: bytes) -> None:
    os.truncate(site.blob_of(path), 0)


def lose_blob(site: Site, path: bytes) -> None:
    site.blob_of(path).unlink()


def evict(site: Site, path: bytes) -> None:
    site.evict(path)


def put_empty_file(site: Site, path: bytes) -> None:
    site.publish(path, b"")


def put_foreign_file(site: Site, path: bytes) -> None:
    site.publish(path, os.urandom(100_000))


def put_other_model(site: Site, path: bytes) -> None:
    content = site.blob_of(path).read_bytes()
    assert content.count(b'"model":"small"') == 1
    site.publish(path, content.replace(b'"model":"small"', b'"model":"smell"'))


def put_neighbour(site: Site, path: bytes) -> None:
    """A chunk of the same model, under another one's name."""
    other = next(p for p in site.paths(first_token=0) if p != path)
    site.publish(path, site.blob_of(other).read_bytes())


SPOILERS = (
    flip, truncate, empty_blob, lose_blob, evict,
    put_empty_file, put_foreign_file, put_other_model, put_neighbour,
)  # fmt: skip
QUARANTINED = {"flip", "truncate", "empty_blob"}


def test_no_bad_chunk_gives_a_wrong_answer_or_ends_the_engine(
    site: Site, engine: EngineProcess, expected: Expected
) -> None:
    question = prompt(1)
    answer = expected[tuple(question)]
    before = site.paths()
    assert engine.ask_one(question, ANSWER_TOKENS).tokens == answer
    engine.settle()
    assert len(site.paths(of=before)) == CHUNKS
    (victim,) = site.paths(first_token=2 * CHUNK_TOKENS, of=before)
    for spoil in SPOILERS:
        name = spoil.__name__
        spoil(site, victim)
        quarantined = site.quarantined()
        engine.forget()
        assert engine.ask_one(question, ANSWER_TOKENS).tokens == answer, name
        engine.settle()
        if name in QUARANTINED:
            assert site.quarantined() > quarantined, name
        # What was recomputed is stored again, and the next request finds everything.
        engine.forget()
        healed = engine.ask_one(question, ANSWER_TOKENS)
        assert (healed.tokens, healed.cached) == (answer, PROMPT_TOKENS), name
        site.verify()
    engine.settle()
    failed = engine.metrics()
    # The node itself notices a blob of a wrong size when it opens it, and has none then.
    assert failed["vllm:kvfs_failed_loads{corrupt}"] == 1
    assert failed["vllm:kvfs_failed_loads{missing}"] >= 1
    assert failed["vllm:kvfs_failed_loads{foreign}"] == 3


def test_a_node_that_dies_costs_misses_until_it_is_back(
    site: Site, engine: EngineProcess, expected: Expected
) -> None:
    known, new = prompt(2), prompt(3)
    assert engine.ask_one(known, ANSWER_TOKENS).tokens == expected[tuple(known)]
    engine.settle()
    before = site.paths()

    site.kill_node()
    engine.forget()
    dead = engine.ask_one(known, ANSWER_TOKENS)
    assert (dead.tokens, dead.cached) == (expected[tuple(known)], 0)
    assert engine.ask_one(new, ANSWER_TOKENS).tokens == expected[tuple(new)]
    engine.settle()

    site.start_node()

    def is_hit() -> bool:  # a client waits a moment before it dials again
        engine.forget()
        reply = engine.ask_one(known, ANSWER_TOKENS)
        assert reply.tokens == expected[tuple(known)]
        return reply.cached == PROMPT_TOKENS

    wait_until(is_hit, 60)
    assert set(before) <= set(site.paths())

    def is_stored() -> bool:
        engine.forget()
        assert engine.ask_one(new, ANSWER_TOKENS).tokens == expected[tuple(new)]
        engine.settle()
        return len(site.paths(of=before)) == CHUNKS

    wait_until(is_stored, 60)
    site.verify()
    assert "answers again" in engine.log_text()


def test_a_reset_connector_neither_finds_nor_is_found(
    site: Site, engine: EngineProcess, expected: Expected
) -> None:
    """After new weights, for which vLLM resets it."""
    question = FAMILY[0]
    assert engine.ask_one(question, ANSWER_TOKENS).tokens == expected[tuple(question)]
    engine.settle()
    before = site.paths()
    engine.forget_all()
    assert engine.ask_one(question, ANSWER_TOKENS).cached == 0
    engine.settle()
    new = site.paths(of=before)
    assert len(new) == 3
    assert {parse_chunk_path(p)[0] for p in new}.isdisjoint(parse_chunk_path(p)[0] for p in before)


def test_preemption_and_shared_prefixes_under_little_memory(
    site: Site, start_engine: StartEngine, expected: Expected
) -> None:
    # Blocks of 32 tokens: all six requests fit, until their answers ask for more.
    blocks = sum(len(question) // 32 + 1 for question in FAMILY) - 5 * len(SHARED) // 32 + 2
    engine = start_engine(
        site.store,
        options={"num_gpu_blocks_override": blocks, "block_size": 32, "max_model_len": 1536},
    )
    for round_number in range(3):
        replies = engine.ask(FAMILY, LONG_ANSWER_TOKENS)
        for question, reply in zip(FAMILY, replies, strict=True):
            assert reply.tokens[:ANSWER_TOKENS] == expected[tuple(question)], round_number
        engine.settle()
        engine.forget()
    counted = engine.metrics()
    assert counted["vllm:kvfs_loaded_tokens"] >= 2 * len(SHARED)
    assert counted["vllm:num_preemptions"] > 0
    site.verify()
    engine.stop()
