"""LMCache restarted on a kvfs mount against LMCache restarted on a plain directory of that disk.

    .venv/bin/python scripts/bench_lmcache.py [--rounds 3] [--directory DIR] [--json]

In each round, for the mount and for the plain directory in turns: start an LMCache server
(multi-process mode) and vLLM anew, warm the engine up with other prompts of the same length, and
ask for prompts whose chunks an earlier server stored, each when nothing is written any more and the
page cache was dropped. Compared is the time to their first token. vLLM computes with one thread,
which a hit hardly needs and which the rest of the machine disturbs less. The mount stays up between
rounds, as a disk does. Needs root, .envs/lmcache, and about 70 seconds for each of 2 + 2 * rounds
lives of an engine on a quiet machine with 2 cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.shell.configs import lmcache_server_command, lmcache_vllm_command  # noqa: E402  (path first)
from scripts.ending import clean_up_on_sigterm  # noqa: E402  (path first)
from scripts.engine_rig import (  # noqa: E402
    Answer,
    ask,
    free_port,
    prompt_tokens,
    vllm_on_lmcache,
    wait_unchanged,
)
from scripts.memory_rig import drop_page_cache  # noqa: E402
from scripts.mount_rig import mounted  # noqa: E402

BINARIES = ROOT / ".envs" / "lmcache" / "bin"
HIT_TOKENS = 2048
PROMPTS = [prompt_tokens(HIT_TOKENS + 1, seed=seed) for seed in (1, 2, 3)]
ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """A directory that LMCache stores in, and what it measured there."""

    name: str
    folder: Path
    logs: Path
    hit_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)


def restart_and_ask(
    target: Target, model: Path, adapter: str, seed: int
) -> tuple[Answer, list[Answer]]:
    """Fresh servers; a cold prompt that nobody has seen, then the known ones."""
    port = free_port()
    server = lmcache_server_command(
        target.folder, port=port, adapter="fs" if adapter == "fs" else "fs_native"
    )
    engine = lmcache_vllm_command(str(model), port)
    with vllm_on_lmcache(server, engine, target.logs, binaries=BINARIES) as vllm:
        # Two of them: the first prompt of a shape is slow whatever the cache does.
        for offset in (0, 1):
            other = prompt_tokens(HIT_TOKENS + 1, seed=seed + offset)
            cold = ask(vllm, other, tokens=ANSWER_TOKENS, model=str(model))
        known = []
        for prompt in PROMPTS:
            wait_unchanged(target.folder)
            drop_page_cache()
            known.append(ask(vllm, prompt, tokens=ANSWER_TOKENS, model=str(model)))
        wait_unchanged(target.folder)
        return cold, known


def measure(targets: list[Target], model: Path, adapter: str, rounds: int) -> None:
    """Fill both directories, then take turns; raises RuntimeError on a wrong answer."""
    expected: list[tuple[int, ...]] = []
    for target in targets:
        _, first = restart_and_ask(target, model, adapter, seed=100)
        expected = expected or [answer.tokens for answer in first]
    for number in range(rounds):
        for target in targets if number % 2 == 0 else targets[::-1]:
            cold, hits = restart_and_ask(target, model, adapter, seed=1000 + 10 * number)
            for hit, tokens in zip(hits, expected, strict=True):
                if hit.cached_tokens != HIT_TOKENS or hit.tokens != tokens:
                    raise RuntimeError(
                        f"{target.name}: {hit.cached_tokens} tokens hit, {hit.tokens}"
                    )
                target.hit_s.append(hit.first_token_s)
            target.cold_s.append(cold.first_token_s)
            shown = " ".join(f"{hit.first_token_s:.3f}" for hit in hits)
            print(f"bench_lmcache: round {number + 1}, {target.name}: {shown} s", file=sys.stderr)


def report(targets: list[Target], adapter: str) -> dict[str, object]:
    """The figures, ready for JSON."""
    mount, plain = targets
    return {
        "adapter": adapter,
        "hit_tokens": HIT_TOKENS,
        "answers": len(mount.hit_s),
        "cold_ttft_s": statistics.median(mount.cold_s + plain.cold_s),
        "mount_ttft_s": mount.hit_s,
        "plain_ttft_s": plain.hit_s,
        "ratio": statistics.median(mount.hit_s) / statistics.median(plain.hit_s),
    }


def main() -> int:
    """Measure and print."""
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--adapter", choices=["fs", "fs_native"], default="fs_native")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: /tmp's")
    parser.add_argument("--model", type=Path, default=ROOT / ".envs" / "models" / "demo")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (BINARIES / "lmcache").exists():
        sys.exit("bench_lmcache: run scripts/setup main lmcache first")
    builder = ROOT / "scripts" / "build_demo_model.py"
    subprocess.run(
        [BINARIES / "python", builder, arguments.model], check=True, stdout=sys.stderr, timeout=300
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="kvfs-bench-") as scratch:
        plain = Path(scratch) / "plain"
        plain.mkdir()
        with mounted(Path(scratch)) as rig:
            logs = Path(scratch)
            targets = [
                Target("mount", rig.mountpoint, logs),
                Target("plain directory", plain, logs),
            ]
            measure(targets, arguments.model, arguments.adapter, arguments.rounds)
            figures = report(targets, arguments.adapter)
    if arguments.json:
        print(json.dumps(figures))
        return 0
    print(f"time to first token, {HIT_TOKENS} tokens, LMCache {arguments.adapter}, after a restart")
    print(f"  computed          {figures['cold_ttft_s']:.3f} s")
    for target in targets:
        rounds = " ".join(f"{seconds:.3f}" for seconds in target.hit_s)
        print(f"  {target.name:<16}  {statistics.median(target.hit_s):.3f} s   ({rounds})")
    print(f"  ratio             {figures['ratio']:.2f}  (mount / plain directory)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
