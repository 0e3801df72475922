"""Real LMCache on a real mount: its server with real vLLM, and its backends by themselves."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.cluster_rig import cluster
from scripts.engine_rig import Answer, ask, free_port, prompt_tokens, vllm_on_lmcache
from tests.processes import wait_until

PROGRAMS = Path(__file__).parent / "programs"
CHUNK_TOKENS = 256
HIT_TOKENS = 2048
CHUNKS = HIT_TOKENS // CHUNK_TOKENS
# One token more than what can come from the cache: an engine always computes the last one.
PROMPT = prompt_tokens(HIT_TOKENS + 1, seed=1)


def printed_commands(mountpoint: Path, model: Path, adapter: str, port: int) -> list[list[str]]:
    """The commands that `kvfs config lmcache` prints, as a shell reads them."""
    command = [sys.executable, "-m", "kvfs", "config", "lmcache", "--mountpoint", str(mountpoint)]
    options = ["--model", str(model), "--adapter", adapter, "--port", str(port)]
    printed = subprocess.run(
        [*command, *options], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    blocks = printed.replace("\\\n", " ").splitlines()
    return [words for line in blocks if (words := shlex.split(line, comments=True))]


def ask_fresh_servers(
    mountpoint: Path, model: Path, adapter: str, binaries: Path, logs: Path
) -> Answer:
    """Start an LMCache server and vLLM as printed, ask once, wait for the files, stop both."""
    server, engine = printed_commands(mountpoint, model, adapter, free_port())
    with vllm_on_lmcache(server, engine, logs, binaries=binaries) as vllm:
        answer = ask(vllm, PROMPT, tokens=16, model=str(model))
        folder = mountpoint / "lmcache"
        wait_until(lambda: len(list(folder.glob("*.data"))) == CHUNKS, 60)
    return answer


@pytest.mark.timeout(900)
@pytest.mark.parametrize("adapter", ["fs", "fs_native"])
def test_a_restarted_server_and_engine_hit_what_lies_in_the_mount(
    start_mount, demo_model: Path, lmcache_python: Path, tmp_path: Path, adapter: str
) -> None:
    mountpoint = start_mount().mountpoint
    binaries = lmcache_python.parent
    cold = ask_fresh_servers(mountpoint, demo_model, adapter, binaries, tmp_path)
    hit = ask_fresh_servers(mountpoint, demo_model, adapter, binaries, tmp_path)
    check_hit(cold, hit)
    assert not [p.name for p in (mountpoint / "lmcache").iterdir() if p.suffix != ".data"]


def check_hit(cold: Answer, hit: Answer) -> None:
    """The second answer is the first one's, of chunks that the first one's engine computed."""
    assert cold.cached_tokens == 0
    assert hit.cached_tokens == HIT_TOKENS
    assert len(hit.tokens) == 16
    assert hit.tokens == cold.tokens


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_server_on_another_node_hits_what_lies_in_the_namespace(
    demo_model: Path, lmcache_python: Path, tmp_path: Path
) -> None:
    binaries = lmcache_python.parent
    with cluster(2, tmp_path) as rig:
        cold, hit = (
            ask_fresh_servers(node.mountpoint, demo_model, "fs_native", binaries, tmp_path)
            for node in rig.nodes
        )
    check_hit(cold, hit)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("odirect", [False, True], ids=["buffered", "odirect"])
@pytest.mark.parametrize("backend", ["local_disk", "fs"])
def test_a_storage_backend_stores_and_loads_equal_bytes(
    start_mount, lmcache_python: Path, tmp_path: Path, backend: str, odirect: bool
) -> None:
    mount = start_mount()
    folder = mount.mountpoint / "lmcache" / backend
    folder.mkdir(parents=True)
    chunks, mib = 8, 8
    command = [lmcache_python, PROGRAMS / "lmcache_storage.py", backend, folder]
    command += ["--chunks", str(chunks), "--mib", str(mib)]
    log = tmp_path / "lmcache.log"
    with open(log, "wb") as output:
        done = subprocess.run(
            [*command, *(["--odirect"] if odirect else [])],
            stdout=subprocess.PIPE,
            stderr=output,
            timeout=240,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["right"] == list(range(chunks))
    assert report["unknown_is_miss"]
    header_bytes = 28 if backend == "fs" and not odirect else 0
    assert sorted(report["files"].values()) == [(mib << 20) + header_bytes] * chunks
