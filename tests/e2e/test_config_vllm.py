"""What `kvfs config vllm` prints is run as it is: real vLLM, restarted, hits the store."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.client import Client
from scripts.engine_rig import (
    ONE_THREAD,
    SMALL_CPU_OPTIONS,
    Answer,
    Server,
    ask,
    free_port,
    prompt_tokens,
)
from tests.processes import wait_until

HIT_TOKENS = 2048
CHUNK_TOKENS = 256
# One token more than what can come from the cache: an engine always computes the last one.
PROMPT = prompt_tokens(HIT_TOKENS + 1, seed=2)


def printed_command(store: Path, model: Path) -> list[str]:
    """The one command that `kvfs config vllm` prints, as a shell reads it."""
    command = [sys.executable, "-m", "kvfs", "config", "vllm", "--store", str(store)]
    printed = subprocess.run(
        [*command, "--model", str(model)], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    lines = printed.replace("\\\n", " ").splitlines()
    (words,) = (words for line in lines if (words := shlex.split(line, comments=True)))
    return words


def stored_chunks(store: Path) -> int:
    with Client(store) as client:
        return int(client.status()["blobs"])


def ask_fresh_engine(store: Path, model: Path, binaries: Path, log: Path) -> Answer:
    """Start vLLM as printed, ask once, wait until all chunks are stored, stop it."""
    port = free_port()
    command = [*printed_command(store, model), "--port", str(port), *SMALL_CPU_OPTIONS]
    with Server("vLLM", command, port, log, binaries=binaries, environment=ONE_THREAD) as vllm:
        vllm.wait_healthy()
        answer = ask(vllm, PROMPT, tokens=16, model=str(model))
        wait_until(lambda: stored_chunks(store) == HIT_TOKENS // CHUNK_TOKENS, 60)
    return answer


@pytest.mark.timeout(900)
def test_a_restarted_server_hits_the_store(
    start_node, demo_model: Path, vllm_python: Path, tmp_path: Path
) -> None:
    node = start_node()
    binaries = vllm_python.parent
    cold = ask_fresh_engine(node.store, demo_model, binaries, tmp_path / "vllm-1.log")
    hit = ask_fresh_engine(node.store, demo_model, binaries, tmp_path / "vllm-2.log")
    assert cold.cached_tokens == 0
    assert hit.cached_tokens == HIT_TOKENS
    assert len(hit.tokens) == 16
    assert hit.tokens == cold.tokens
