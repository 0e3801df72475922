"""A burst of requests whose prompts are cached on three slow tiers: the time to their first token
with kvfs, LMCache and vLLM's tiering.

    .venv/bin/python scripts/bench_burst.py [--rounds 2] [--requests 16] [--mb-per-s 80 40 24]
        [--systems kvfs lmcache vllm] [--directory DIR] [--json]

The tiers are FUSE file systems that read so many MB/s each (scripts/slow_files.py), write as fast
as they can, and keep nothing in the page cache; the same three for all, each system in its own
folder. In a first life of its engine every system stores prompts of 2,048 tokens and one more in
all three. Then, in each round and in turns, its processes start anew, answer two other prompts of
that length, and are sent all the prompts at once. Answers must hit 2,048 tokens each, and be those
of the first life.

- kvfs: a node whose configuration has the three as `[[tiers]]`, and the vLLM connector. Copies in
  its own store are evicted when all tiers have them, so that they must come from the tiers.
- LMCache: its server (multi-process mode) with the three as L2 adapters, and its connector.
- vLLM: its tiering with the three as `fs` tiers. Its worker is ours (scripts/vllm_cpu_tiering.py)
  and copies in the engine's thread, which computes nothing meanwhile; kvfs has threads for that.

All store chunks of 256 tokens. The model is small, so that the tiers are what is waited for. Needs
.envs/lmcache, .envs/vllm and FUSE.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.config import GIB, MIB  # noqa: E402  (path first)
from kvfs.shell.configs import (  # noqa: E402
    LMCACHE_CHUNK_TOKENS,
    lmcache_transfer_config,
    vllm_transfer_config,
)
from scripts.bench_rivals import link_equal  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.engine_rig import (  # noqa: E402
    COPIED_DEADLINE_S,
    ONE_THREAD,
    SMALL_CPU_OPTIONS,
    Answer,
    Server,
    ask,
    files_below,
    free_port,
    prompt_tokens,
    remove_offload_region,
    wait_chunks,
    wait_unchanged,
)
from scripts.node_rig import node_of  # noqa: E402
from scripts.slow_files import SlowDirectory  # noqa: E402

HIT_TOKENS = 2048
CHUNKS = HIT_TOKENS // LMCACHE_CHUNK_TOKENS  # of a prompt
ANSWER_TOKENS = 4
TOKEN_BYTES = 16 * 1024  # of KV, with MODEL
CHUNK_BYTES = LMCACHE_CHUNK_TOKENS * TOKEN_BYTES
MODEL = ("--hidden", "256", "--inter", "512", "--layers", "8", "--heads", "4", "--kv-heads", "4")
NAMES = {"kvfs": "kvfs", "lmcache": "LMCache", "vllm": "vLLM tiering"}
ENVIRONMENTS = {"kvfs": "vllm", "lmcache": "lmcache", "vllm": "vllm"}


@dataclass(slots=True)
class System:
    """One of the three, and what it measured: times to the first token of each round."""

    name: str
    bursts: list[list[Answer]] = field(default_factory=list)
    expected: list[tuple[int, ...]] = field(default_factory=list)

    def first_s(self) -> list[float]:
        return sorted(answer.first_token_s for burst in self.bursts for answer in burst)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a life has its tiers, and what it may use besides."""

    tiers: list[Path]
    files: list[Path]  # the same, past the limit
    own: Path  # on a fast disk, the same in each life of a system
    model: Path
    requests: int


@contextmanager
def life(system: str, place: Place) -> Iterator[Server]:
    """A vLLM server, and what it needs, for the length of the `with`."""
    place.own.mkdir(parents=True, exist_ok=True)
    binaries = ROOT / ".envs" / ENVIRONMENTS[system] / "bin"
    with ExitStack() as stack:
        transfer = TRANSFERS[system](stack, place)
        port = free_port()
        command = ["python", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(place.model), "--port", str(port), *SMALL_CPU_OPTIONS]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        engine = stack.enter_context(
            Server(
                "vLLM",
                command,
                port,
                place.own / "vllm.log",
                binaries=binaries,
                environment={**ONE_THREAD, "PYTHONPATH": str(ROOT)},
            )
        )
        engine.wait_healthy()
        yield engine


def kvfs_transfer(stack: ExitStack, place: Place) -> dict[str, Any]:
    store = place.own / "store"
    store.mkdir(exist_ok=True)
    (store / "kvfs.toml").write_text(
        "".join(
            f'[[tiers]]\nname = "tier{number}"\nkind = "nvme"\npath = "{tier}"\n'
            for number, tier in enumerate(place.tiers)
        )
    )
    stack.enter_context(node_of(store))
    transfer = vllm_transfer_config(store)
    transfer["kv_connector_extra_config"] = {"kvfs.store": str(store), "kvfs.start_node": False}
    return transfer


def lmcache_transfer(stack: ExitStack, place: Place) -> dict[str, Any]:
    port, http_port = free_port(), free_port()
    command = ["lmcache", "server", "--host", "localhost", "--port", str(port)]
    command += ["--http-port", str(http_port), "--prometheus-port", str(free_port())]
    command += ["--chunk-size", str(LMCACHE_CHUNK_TOKENS), "--supported-transfer-mode", "auto"]
    command += ["--l1-size-gb", f"{memory_bytes(place) / GIB:.2f}", "--eviction-policy", "LRU"]
    for tier in place.tiers:
        command += ["--l2-adapter", json.dumps({"type": "fs_native", "base_path": str(tier)})]
    server = stack.enter_context(
        Server(
            "LMCache",
            command,
            http_port,
            place.own / "lmcache.log",
            binaries=ROOT / ".envs" / "lmcache" / "bin",
        )
    )
    server.wait_healthy("/healthcheck")
    return lmcache_transfer_config(port)


def vllm_transfer(stack: ExitStack, place: Place) -> dict[str, Any]:
    region = f"kvfs-bench-{os.getpid()}"
    stack.callback(remove_offload_region, region)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": region,
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "scripts.vllm_cpu_tiering",
            "cpu_bytes_to_use": memory_bytes(place),
            "block_size": LMCACHE_CHUNK_TOKENS,
            "secondary_tiers": [{"type": "fs", "root_dir": str(tier)} for tier in place.tiers],
        },
    }


TRANSFERS: dict[str, Callable[[ExitStack, Place], dict[str, Any]]] = {
    "kvfs": kvfs_transfer,
    "lmcache": lmcache_transfer,
    "vllm": vllm_transfer,
}


def memory_bytes(place: Place) -> int:
    """Of the rivals' own first tier: all prompts, and some more."""
    return (place.requests + 8) * HIT_TOKENS * TOKEN_BYTES


def prompts(count: int, seed: int) -> list[list[int]]:
    return [prompt_tokens(HIT_TOKENS + 1, seed=seed + number) for number in range(count)]


def store(system: System, place: Place) -> None:
    """The first life: every prompt is computed, and lies in all tiers at the end."""
    with life(system.name, place) as engine:
        for prompt in prompts(place.requests, seed=0):
            answer = ask(engine, prompt, tokens=ANSWER_TOKENS, model=str(place.model))
            system.expected.append(answer.tokens)
        for files in place.files:
            wait_chunks(files, place.requests * CHUNKS, CHUNK_BYTES)
        if system.name == "kvfs":
            evict(place.own / "store")
    link_equal(place.files)


def evict(own_store: Path) -> None:
    """Give up the store's own copies. RuntimeError when some stay."""
    words = [sys.executable, "-m", "kvfs", "evict", "--store", str(own_store), "kv"]
    subprocess.run(words, check=True, cwd=ROOT, stdout=sys.stderr, timeout=60)
    end_s = time.monotonic() + COPIED_DEADLINE_S
    while left := sum(size > MIB for _, size in files_below(own_store)):
        if time.monotonic() > end_s:
            raise RuntimeError(f"{left} chunks stay in {own_store}")
        time.sleep(0.1)


def burst(system: System, place: Place, number: int) -> None:
    """A later life: all prompts at once. RuntimeError for a wrong answer, or one that was
    computed."""
    with life(system.name, place) as engine:
        for other in prompts(2, seed=1000 + 10 * number):
            ask(engine, other, tokens=ANSWER_TOKENS, model=str(place.model))
        for files in place.files:
            wait_unchanged(files)
        if system.name == "kvfs":
            evict(place.own / "store")
        with ThreadPoolExecutor(place.requests) as pool:
            answers = list(
                pool.map(
                    lambda prompt: ask(
                        engine, prompt, tokens=ANSWER_TOKENS, model=str(place.model)
                    ),
                    prompts(place.requests, seed=0),
                )
            )
    for answer, expected in zip(answers, system.expected, strict=True):
        if answer.cached_tokens != HIT_TOKENS or answer.tokens != expected:
            raise RuntimeError(
                f"{system.name}: {answer.cached_tokens} tokens hit; {answer.tokens}, not {expected}"
            )
    system.bursts.append(answers)
    note(f"round {number + 1}: {NAMES[system.name]}: {show_times(sorted(times(answers)))}")


def times(answers: list[Answer]) -> list[float]:
    return [answer.first_token_s for answer in answers]


def show_times(ordered_s: list[float]) -> str:
    return f"mean {statistics.fmean(ordered_s):.3f} s, slowest {ordered_s[-1]:.3f} s"


def note(text: str) -> None:
    print(f"bench_burst: {text}", file=sys.stderr, flush=True)


def measure(arguments: argparse.Namespace, folder: Path) -> list[System]:
    """Fill the tiers, then take turns."""
    model = folder / "model"
    python = ROOT / ".envs" / "vllm" / "bin" / "python"
    words = [python, ROOT / "scripts" / "build_demo_model.py", *MODEL, model]
    subprocess.run(words, check=True, stdout=sys.stderr, timeout=300)
    systems = [System(name) for name in arguments.systems]
    with ExitStack() as stack:
        slow = [
            stack.enter_context(
                SlowDirectory(folder / f"files{n}", folder / f"tier{n}", speed * 1e6)
            )
            for n, speed in enumerate(arguments.mb_per_s)
        ]
        places = {
            name: Place(
                tiers=[directory.mountpoint / name for directory in slow],
                files=[directory.files / name for directory in slow],
                own=folder / f"own-{name}",
                model=model,
                requests=arguments.requests,
            )
            for name in arguments.systems
        }
        for system in systems:
            store(system, places[system.name])
            note(f"{NAMES[system.name]} has stored")
        for number in range(arguments.rounds):
            first = number % len(systems)
            for system in systems[first:] + systems[:first]:
                burst(system, places[system.name], number)
    return systems


def main() -> int:
    """Measure and print."""
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--mb-per-s", type=float, nargs="+", default=[80.0, 40.0, 24.0])
    parser.add_argument("--systems", choices=list(NAMES), nargs="+", default=list(NAMES))
    parser.add_argument("--directory", type=Path, help="of the files; default: /tmp's")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for system in arguments.systems:
        if not (ROOT / ".envs" / ENVIRONMENTS[system] / "bin" / "python").exists():
            sys.exit(f"bench_burst: run scripts/setup main {ENVIRONMENTS[system]} first")
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-bench-") as scratch:
        systems = measure(arguments, Path(scratch))
    if arguments.json:
        print(json.dumps({system.name: system.first_s() for system in systems}))
        return 0
    print(
        f"time to first token of {arguments.requests} requests at once, {HIT_TOKENS} tokens of each"
        f" on tiers of {' : '.join(f'{speed:g}' for speed in arguments.mb_per_s)} MB/s"
    )
    for system in systems:
        print(f"  {NAMES[system.name]:<14}{show_times(system.first_s())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
