"""Real vLLM whose cache is not one plain table: KV groups, ranks; and the server with metrics."""

import http.client
import os
from pathlib import Path

import pytest

from kvfs.names import parse_chunk_path, parse_key
from kvfs.shell.configs import vllm_command
from scripts.engine_rig import SMALL_CPU_OPTIONS, Server, ask, free_port
from tests.engines import Site, StartEngine, prompt_of
from tests.processes import wait_until

pytestmark = pytest.mark.timeout(1500)  # an engine starts in 10 s, or minutes on a busy machine

CHUNK_TOKENS = 256
ANSWER_TOKENS = 8


def parts(site: Site) -> list[tuple[int, int]]:
    """Group and shard of every chunk file."""
    keys = [parse_key(parse_chunk_path(path)[1]) for path in site.paths()]
    return [(group, shard) for _, group, shard in keys]


def test_a_model_with_sliding_windows_loads_only_what_its_windows_reach(
    site: Site, start_engine: StartEngine, hybrid_model: Path
) -> None:
    engine = start_engine(site.store, model=hybrid_model)
    question = prompt_of(6 * CHUNK_TOKENS + 1, seed=1)
    cold = engine.ask_one(question, ANSWER_TOKENS)
    engine.settle()
    assert sorted(parts(site)) == [(0, 0)] * 6 + [(1, 0)] * 6

    engine.forget()
    warm = engine.ask_one(question, ANSWER_TOKENS)
    assert (warm.tokens, warm.cached) == (cold.tokens, 6 * CHUNK_TOKENS)
    # All six of the one group, two of the other: its window is 512 tokens.
    assert engine.metrics()["vllm:kvfs_loaded_chunks"] == 6 + 2

    # A failed load of several groups is a failed request for vLLM, which computes it anew.
    (victim,) = [path for path in site.paths(first_token=5 * CHUNK_TOKENS) if b"-g1-" in path]
    blob = site.blob_of(victim)
    with open(blob, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    engine.forget()
    spoiled = engine.ask_one(question, ANSWER_TOKENS)
    assert spoiled.tokens == cold.tokens
    assert engine.metrics()["vllm:kvfs_failed_loads{corrupt}"] == 1
    engine.forget()
    healed = engine.ask_one(question, ANSWER_TOKENS)
    assert (healed.tokens, healed.cached) == (cold.tokens, 6 * CHUNK_TOKENS)

    # A prompt that ends with a chunk: one chunk less is loaded, so that no window begins too early.
    engine.forget()
    whole = engine.ask_one(question[:-1], ANSWER_TOKENS)
    assert whole.cached == 5 * CHUNK_TOKENS

    # An engine that ends saves what it still holds.
    engine.ask_one(prompt_of(2 * CHUNK_TOKENS + 1, seed=2), 1)
    engine.stop()
    assert sorted(parts(site)) == [(0, 0)] * 8 + [(1, 0)] * 8
    site.verify()


def test_two_ranks_store_a_shard_each_and_load_only_what_both_have(
    own_site: Site, start_engine: StartEngine
) -> None:
    site = own_site
    engine = start_engine(
        site.store,
        options={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    )
    question = prompt_of(3 * CHUNK_TOKENS + 1, seed=1)
    cold = engine.ask_one(question, ANSWER_TOKENS)
    engine.settle()
    assert sorted(parts(site)) == [(0, 0)] * 3 + [(0, 1)] * 3
    engine.forget()
    warm = engine.ask_one(question, ANSWER_TOKENS)
    assert (warm.tokens, warm.cached) == (cold.tokens, 3 * CHUNK_TOKENS)
    # One rank's shard of the last chunk is gone: the chunk is a miss for both.
    (lost,) = [path for path in site.paths(first_token=2 * CHUNK_TOKENS) if b"-s1." in path]
    site.evict(lost)
    engine.forget()
    shorter = engine.ask_one(question, ANSWER_TOKENS)
    assert (shorter.tokens, shorter.cached) == (cold.tokens, 2 * CHUNK_TOKENS)
    engine.settle()
    assert sorted(parts(site)) == [(0, 0)] * 3 + [(0, 1)] * 3
    # One rank's shard is bad: what came before it is kept, by both.
    with open(site.blob_of(lost), "r+b") as file:
        file.write(b"\0" * 8)
    engine.forget()
    spoiled = engine.ask_one(question, ANSWER_TOKENS)
    assert spoiled.tokens == cold.tokens
    engine.stop()


def test_a_server_as_kvfs_config_prints_it_shows_what_kvfs_did(
    site: Site, small_model: Path, vllm_python: Path, tmp_path: Path
) -> None:
    port = free_port()
    command = [*vllm_command(site.store, str(small_model)), "--port", str(port)]
    question = prompt_of(2 * CHUNK_TOKENS + 1, seed=9)
    log = tmp_path / "server.log"
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with Server(
        "vLLM",
        [*command, *SMALL_CPU_OPTIONS],
        port,
        log,
        binaries=vllm_python.parent,
        environment=environment,
    ) as server:
        server.wait_healthy()
        assert counters(port)["vllm:kvfs_loaded_tokens_total"] == 0
        cold = ask(server, question, tokens=4, model=str(small_model))
        wait_until(lambda: counters(port)["vllm:kvfs_saved_chunks_total"] == 2, 60)
        wait_until(lambda: post(port, "/reset_prefix_cache") == 200, 60)
        warm = ask(server, question, tokens=4, model=str(small_model))
        assert (warm.tokens, warm.cached_tokens) == (cold.tokens, 2 * CHUNK_TOKENS)
        wait_until(lambda: counters(port)["vllm:kvfs_loaded_tokens_total"] == 512, 60)
        shown = counters(port)
        assert shown["vllm:kvfs_requests_total"] == 2
        assert shown["vllm:kvfs_found_tokens_total"] == 512
        assert shown["vllm:kvfs_load_seconds_count"] == 1
        assert shown['vllm:prompt_tokens_cached_by_source_total{source="disk"}'] == 512
        wait_until(lambda: "kvfs tokens requested" in log.read_text(), 60)


def counters(port: int) -> dict[str, float]:
    """What /metrics says of kvfs and of sources, by name; the source in braces."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        kind, _, labels = name.partition("{")
        if kind.startswith("vllm:kvfs_"):
            found[kind] = found.get(kind, 0) + float(value)
        elif 'source="disk"' in labels:
            found[f'{kind}{{source="disk"}}'] = float(value)
    return found


def post(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path)
    status = connection.getresponse().status
    connection.close()
    return status
