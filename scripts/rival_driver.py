"""Has one system store requests in all its tiers, or load them, and says when each was there.

Run by scripts/bench_rivals.py with the interpreter of the system's environment:

    python scripts/rival_driver.py lmcache|vllm|kvfs --requests N --chunks N --mib N
        [--odirect] DIR DIR DIR

A request is a number of chunks that nobody else has. Each line on standard input is a command of
JSON, each line on standard output its answer: `["store"]` puts every request into every directory;
`["load", TIMES]` has request n arrive at TIMES[n] seconds and answers how long each took until the
last byte was in memory, and how many came back as they were stored. Nothing is kept between two
loads. What the system prints goes to standard error.

- `lmcache`: a server of its multi-process mode with an L2 adapter (`fs_native`) for each directory,
  and LMCache's own client of it (that of `lmcache bench server`). A request has come when the
  server says that its memory has it; the engine would ask in its steps, here every 2 ms.
- `vllm`: its tiering manager with a `fs` tier for each directory, asked as its scheduler asks in
  every step. A request has come when all its chunks are hits in the first tier, vLLM's memory.
- `kvfs`: a tier for each directory, read by `kvfs.transfer`. A request has come when it was copied
  from staging memory to where it belongs. The others' copy follows when no time runs any more.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm, ignore_sigterm  # noqa: E402  (path first)
from scripts.rival_systems import DEADLINE_S, STEP_S, LMCache, System, Vllm  # noqa: E402


def system_of(arguments: argparse.Namespace) -> System:
    if arguments.system == "lmcache":
        return LMCache(arguments)
    if arguments.system == "vllm":
        return Vllm(arguments)
    from scripts.rival_kvfs import Kvfs  # here: its packages are not in the rivals' environments

    return Kvfs(arguments)


def load(system: System, times_s: Sequence[float]) -> dict[str, Any]:
    """Let requests arrive, and see when each is there. Raises TimeoutError."""
    system.forget()
    took_s = [0.0] * len(times_s)
    order = sorted(range(len(times_s)), key=times_s.__getitem__)
    left = set(order)
    began_s = time.monotonic()
    while left:
        now_s = time.monotonic() - began_s
        if now_s > DEADLINE_S:
            raise TimeoutError(f"{len(left)} requests were not loaded in {DEADLINE_S:g} s")
        while order and times_s[order[0]] <= now_s:
            system.begin(order.pop(0))
        for request in system.step():
            left.discard(request)
            took_s[request] = time.monotonic() - began_s - times_s[request]
        time.sleep(STEP_S)
    whole_s = time.monotonic() - began_s
    system.collect()
    return {"took_s": took_s, "whole_s": whole_s, "right": system.count_right()}


def main() -> int:
    """Obey until there are no more commands."""
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["kvfs", "lmcache", "vllm"])
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--log", type=Path, required=True, help="where what it starts may write")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--chunks", type=int, required=True)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--odirect", action="store_true", help="of LMCache; vLLM looks, kvfs too")
    parser.add_argument("--kind", default="nvme", help="of kvfs's tiers")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    system = system_of(arguments)
    try:
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            command, *words = json.loads(line)
            answer: Any = load(system, *words) if command == "load" else system.store()
            print(json.dumps(answer), file=answers)
    finally:
        ignore_sigterm()
        system.close()
    return 0


if __name__ == "__main__":
    exit_code = 1
    try:
        exit_code = main()
    except SystemExit as ending:
        exit_code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001  (the outer edge of this process)
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(exit_code)  # the systems leave threads behind that would keep the process alive
