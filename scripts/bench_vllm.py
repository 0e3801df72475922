"""vLLM restarted with kvfs's connector, with its own `fs` tier, and with no cache at all.

    .venv/bin/python scripts/bench_vllm.py [--rounds 3] [--cold-rounds 1] [--dir DIRECTORY] [--json]

Each system stores a few prompts in a first life of the engine. Then, in each round and in turns,
every system's engine starts anew (kvfs's node too) and answers another prompt of the same length to
warm up. Before each stored prompt it waits until nothing is written any more and drops the page
cache; then it answers. Compared is the time to the first token, of the first prompt after the
restart and of all. Both caches lie on the same disk; the model and its settings are the same.

The type is bfloat16 where the CPU multiplies it, float32 where it would only emulate it: a slow
cold run would flatter every cache. Whether the answers equal those without a cache is checked in
float32, in a round of its own where the timing is in bfloat16.

On a machine that others use, a team of compute threads waits for its slowest, and figures mean
little: --threads 1 makes them steadier, at the price of a slower cold run.

Needs root to drop the page cache, and .envs/vllm. Starts an engine 11 times for 3 rounds, about 20
to 60 seconds each on a quiet machine with 2 cores; with --cold-rounds the slow one, without a
cache, takes part in so many rounds only.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.engine_rig import OFFLINE  # noqa: E402  (path first)
from scripts.node_rig import node_of  # noqa: E402

PYTHON = ROOT / ".envs" / "vllm" / "bin" / "python"
MODEL = ROOT / ".envs" / "models" / "demo"
HIT_TOKENS = 2048
PROMPT_TOKENS = HIT_TOKENS + 1  # an engine computes at least one token itself
PROMPT_SEEDS = (1, 2, 3)
LIFE_DEADLINE_S = 600.0
FS_MEMORY_BYTES = 512 << 20  # vLLM's tier in memory, through which its fs tier goes
EXACT_TYPE = "float32"
# What /proc/cpuinfo calls multiplication of bfloat16.
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
OF_COLD_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said of one prompt."""

    first_token_s: float
    tokens: tuple[int, ...]
    cached_tokens: int
    external_hits: int
    is_page_cache_dropped: bool


@dataclass(slots=True)
class System:
    """One way to serve. `connector` is vLLM's kv_transfer_config; `directory` what it stores in."""

    name: str
    directory: Path | None = None
    connector: dict[str, Any] | None = None
    has_node: bool = False
    lives: list[list[Answer]] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        return [answer for life in self.lives for answer in life]

    @property
    def first_s(self) -> list[float]:
        """Of the first prompt after each restart."""
        return [life[0].first_token_s for life in self.lives]

    @property
    def all_s(self) -> list[float]:
        return [answer.first_token_s for answer in self.answers]


def systems_below(scratch: Path) -> list[System]:
    """No cache, vLLM's fs tier, and kvfs, each with an empty directory of its own."""
    fs, store = scratch / "fs", scratch / "store"
    fs.mkdir(parents=True)
    tier = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": region_name(scratch),
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "scripts.vllm_cpu_tiering",
            "cpu_bytes_to_use": FS_MEMORY_BYTES,
            "secondary_tiers": [{"type": "fs", "root_dir": str(fs)}],
        },
    }
    ours = {
        "kv_connector": "KvfsConnector",
        "kv_connector_module_path": "gpu_bridge.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvfs.store": str(store), "kvfs.start_node": False},
    }
    return [
        System("no cache"),
        System("vLLM fs tier", fs, tier),
        System("kvfs", store, ours, has_node=True),
    ]


def region_name(scratch: Path) -> str:
    """Names the memory that vLLM's tier shares between processes, so that it can be removed."""
    return f"kvfs-bench-{os.getpid()}-{scratch.name}"


def threads_environment(threads: int | None) -> dict[str, str]:
    """Has an engine compute with so many threads; None: as vLLM chooses."""
    if threads is None:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}


def live(
    system: System, dtype: str, threads: int | None, log: Path, warm_seed: int
) -> list[Answer]:
    """One life of an engine. RuntimeError with the end of its log when it does not get through."""
    command: list[object] = [PYTHON, ROOT / "scripts" / "vllm_restart.py", MODEL, "--dtype", dtype]
    command += ["--tokens", PROMPT_TOKENS, "--seeds", *PROMPT_SEEDS, "--warm-seed", warm_seed]
    if system.connector is not None:
        command += ["--connector", json.dumps(system.connector), "--watch", system.directory]
    node = node_of(system.directory) if system.has_node and system.directory else nullcontext()
    with node, open(log, "wb") as errors:
        engine = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={
                **os.environ,
                **OFFLINE,
                **threads_environment(threads),
                "PYTHONPATH": str(ROOT),
            },
            start_new_session=True,
        )
        try:
            output, _ = engine.communicate(timeout=LIFE_DEADLINE_S)
        finally:
            end_group(engine.pid)
            engine.wait()
    lines = [line for line in output.splitlines() if line.startswith(b"[{")]
    if engine.returncode or not lines:
        said = output.decode(errors="replace") + log.read_text(errors="replace")
        raise RuntimeError(f"{system.name}: the engine failed:\n" + said[-6000:])
    return [
        Answer(
            answer["first_token_s"],
            tuple(answer["tokens"]),
            answer["cached_tokens"],
            answer["external_hits"],
            answer["is_page_cache_dropped"],
        )
        for answer in json.loads(lines[-1])
    ]


def end_group(pid: int) -> None:
    """Kill what is left of a process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is


def measure(
    scratch: Path, dtype: str, threads: int | None, rounds: int, cold_rounds: int
) -> list[System]:
    """Fill both caches, then take turns. Removes what vLLM's tier leaves in shared memory."""
    systems = systems_below(scratch)
    log = scratch / "engine.log"
    try:
        for system in systems[1:]:
            progress(f"{dtype}: {system.name} stores")
            live(system, dtype, threads, log, warm_seed=100)
        for number in range(rounds):
            for turn in range(len(systems)):
                system = systems[(turn + number) % len(systems)]
                if system.connector is None and number >= cold_rounds:
                    continue
                life = live(system, dtype, threads, log, warm_seed=1000 + number)
                system.lives.append(life)
                said = " ".join(
                    f"{answer.first_token_s:.3f} s ({answer.cached_tokens} hit)" for answer in life
                )
                progress(f"{dtype}: round {number + 1}, {system.name}: {said}")
    finally:
        for left in Path("/dev/shm").glob(f"vllm_offload_{region_name(scratch)}*"):
            left.unlink()
    return systems


def progress(text: str) -> None:
    print(f"bench_vllm: {text}", file=sys.stderr, flush=True)


def timing_type() -> str:
    """The type that this CPU computes fastest."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if words & BFLOAT16_FLAGS else EXACT_TYPE


def report(
    timed: list[System], exact: list[System], dtype: str, threads: int | None
) -> dict[str, Any]:
    """The figures, ready for JSON."""
    cold, fs, kvfs = timed
    expected = [answer.tokens for answer in exact[0].lives[0]]
    every = [answer for system in timed + exact for answer in system.answers]
    cold_s = statistics.median(cold.all_s)
    rows = {
        system.name: {
            "first_ttft_s": [round(seconds, 4) for seconds in system.first_s],
            "ttft_s": [round(seconds, 4) for seconds in system.all_s],
            "first_of_cold": round(statistics.median(system.first_s) / cold_s, 4),
            "of_cold": round(statistics.median(system.all_s) / cold_s, 4),
            "hit_tokens": [answer.cached_tokens for answer in system.answers],
            "external_hit_tokens": [answer.external_hits for answer in system.answers],
            "has_equal_tokens": all(
                [answer.tokens for answer in life] == expected for life in same.lives
            ),
        }
        for system, same in zip(timed, exact, strict=True)
    }
    return {
        "setup": {
            "model": "105M random weights (scripts/build_demo_model.py)",
            "dtype": dtype,
            "token_check_dtype": EXACT_TYPE,
            "prompt_tokens": PROMPT_TOKENS,
            "prompts": len(PROMPT_SEEDS),
            "rounds": len(kvfs.lives),
            "cold_rounds": len(cold.lives),
            "cpus": os.cpu_count(),
            "threads": threads or "as vLLM chooses",
            "load_average": round(os.getloadavg()[1], 1),
            "is_page_cache_dropped": all(answer.is_page_cache_dropped for answer in every),
        },
        "systems": rows,
        "kvfs_to_fs_first": round(
            statistics.median(kvfs.first_s) / statistics.median(fs.first_s), 3
        ),
        "kvfs_to_fs": round(statistics.median(kvfs.all_s) / statistics.median(fs.all_s), 3),
    }


def problems_of(figures: dict[str, Any]) -> list[str]:
    """What is not as it must be; times are judged by whoever reads them."""
    found = []
    for name, row in figures["systems"].items():
        if not row["has_equal_tokens"]:
            found.append(f"{name}: the answer is not the one without a cache")
        wanted = 0 if name == "no cache" else HIT_TOKENS
        if any(hit != wanted for hit in row["hit_tokens"]):
            found.append(f"{name}: {row['hit_tokens']} tokens hit, not {wanted}")
    if not figures["setup"]["is_page_cache_dropped"]:
        found.append("the page cache was not dropped: that needs root")
    return found


def show(figures: dict[str, Any], directory: Path) -> None:
    """Print the table, and how it was made."""
    setup = figures["setup"]
    drop = "dropped" if setup["is_page_cache_dropped"] else "NOT dropped"
    print(
        f"Time to first token after a restart: {PROMPT_TOKENS} tokens, {HIT_TOKENS} stored\n"
        f"  {setup['rounds']} restarts of each system in turns, {setup['cold_rounds']} of no cache,"
        f" {setup['prompts']} prompts each;"
        f" page cache {drop} before each prompt\n"
        f"  {setup['model']}, {setup['dtype']}, both caches on the disk of"
        f" {directory}\n"
        f"  {setup['cpus']} CPUs, load {setup['load_average']}, compute threads:"
        f" {setup['threads']}\n"
        f"  every engine a new process that answered one other prompt; answers compared in"
        f" {EXACT_TYPE}\n"
        f"  fs tier: vLLM's, {FS_MEMORY_BYTES >> 20} MiB of memory before it, memcpy worker\n"
    )
    print(
        f"{'medians':<14}{'first':>9}{'of cold':>9}{'all':>10}{'of cold':>9}{'hit':>6}  same answer"
    )
    for name, row in figures["systems"].items():
        first_s, all_s = statistics.median(row["first_ttft_s"]), statistics.median(row["ttft_s"])
        print(
            f"{name:<14}{first_s:>7.3f} s{row['first_of_cold']:>9.1%}"
            f"{all_s:>8.3f} s{row['of_cold']:>9.1%}"
            f"{min(row['hit_tokens']):>6}  {'yes' if row['has_equal_tokens'] else 'NO'}"
        )
    first, every = figures["kvfs_to_fs_first"], figures["kvfs_to_fs"]
    of_cold = figures["systems"]["kvfs"]["first_of_cold"]
    print(f"\nkvfs / fs tier: {first:.2f} first, {every:.2f} all   (wanted: at most 1)")
    print(f"kvfs / cold:    {of_cold:.1%} first   (wanted: at most {OF_COLD_MAX:.0%})")


def main() -> int:
    """Measure and print; 1 when a system missed, or answered something else."""
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold-rounds", type=int, help="of them without a cache too; default: all")
    parser.add_argument("--dir", type=Path, help="on the disk to measure; default: /tmp's")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=timing_type())
    parser.add_argument("--threads", type=int, help="that compute; default: as vLLM chooses")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not PYTHON.exists():
        sys.exit("bench_vllm: run scripts/setup main vllm first")
    counts = (arguments.rounds, arguments.cold_rounds, arguments.threads)
    if any(count is not None and count < 1 for count in counts):
        parser.error("--rounds, --cold-rounds and --threads must be at least 1")
    builder = ROOT / "scripts" / "build_demo_model.py"
    subprocess.run([PYTHON, builder, MODEL], check=True, stdout=sys.stderr, timeout=300)
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="kvfs-bench-") as scratch:
        timed = measure(
            Path(scratch) / "timed",
            arguments.dtype,
            arguments.threads,
            arguments.rounds,
            arguments.cold_rounds or arguments.rounds,
        )
        exact = timed
        if arguments.dtype != EXACT_TYPE:
            exact = measure(Path(scratch) / "exact", EXACT_TYPE, arguments.threads, 1, 1)
        figures = report(timed, exact, arguments.dtype, arguments.threads)
        directory = Path(scratch).parent
    if arguments.json:
        print(json.dumps(figures))
    else:
        show(figures, directory)
    problems = problems_of(figures)
    for problem in problems:
        print(f"bench_vllm: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
