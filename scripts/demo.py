"""The first result: mount kvfs, let vLLM answer a prompt, and a new vLLM answer it from files.

    .venv/bin/python scripts/demo.py [--store DIR] [--mountpoint DIR] [--tokens N]
    .venv/bin/python scripts/demo.py --stop [--mountpoint DIR]

`make run` and `make stop` call it. The mount stays up at the end. Exit code 1 and one line on
standard error when something is missing.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.shell.configs import vllm_transfer_config  # noqa: E402  (path first)
from scripts.build_demo_model import sentences  # noqa: E402
from scripts.memory_rig import drop_page_cache  # noqa: E402

KVFS = ROOT / ".venv" / "bin" / "kvfs"
VLLM_PYTHON = ROOT / ".envs" / "vllm" / "bin" / "python"
MODEL = ROOT / ".envs" / "models" / "demo"
DEMO = ROOT / ".demo"
CHUNK_TOKENS = 256

START_DEADLINE_S = 300.0
ANSWER_DEADLINE_S = 300.0
STORE_DEADLINE_S = 60.0


class CannotRun(Exception):
    """Something is missing; the text says what, and what to do."""


def say(text: str) -> None:
    """One line for the person who waits."""
    print(text, flush=True)


# Checks and the mount ---------------------------------------------------------------------------


def check_machine() -> None:
    """Raise `CannotRun` for what would fail later with a longer text."""
    if sys.platform != "linux":
        raise CannotRun("kvfs needs Linux")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CannotRun(
            "/dev/fuse is missing or not yours to open: load the fuse module, run as root, "
            "or give the container --device /dev/fuse --cap-add SYS_ADMIN"
        )
    if not KVFS.exists() or not VLLM_PYTHON.exists():
        raise CannotRun("run scripts/setup main vllm first (make run does)")


def run_kvfs(*words: str | Path, capture: bool = False) -> str:
    """Run a `kvfs` command. `CannotRun` with its own last line when it fails."""
    done = subprocess.run(
        [KVFS, *words],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CannotRun(last)
    return done.stdout or ""


def ensure_mounted(mountpoint: Path, store: Path) -> None:
    """Mount, unless this store is mounted there already."""
    status = mountpoint / ".kvfs" / "status.json"
    try:
        shown = Path(json.loads(status.read_text())["store"])
    except (OSError, ValueError, KeyError):
        shown = None  # not mounted, or its process is dead: kvfs mount sees to that
    if shown == store:
        say(f"  {mountpoint} is mounted already")
        return
    if shown is not None:
        raise CannotRun(f"{mountpoint} shows another store, {shown}: make stop, or --mountpoint")
    mountpoint.mkdir(parents=True, exist_ok=True)
    run_kvfs("mount", mountpoint, "--store", store, "--tokenizer", MODEL)


def stop(mountpoint: Path) -> None:
    """Unmount; says so when nothing is mounted."""
    if not os.path.ismount(mountpoint):
        say(f"nothing is mounted at {mountpoint}")
        return
    run_kvfs("umount", mountpoint)
    say(f"unmounted {mountpoint}; the files stay in the store")


# The engine -------------------------------------------------------------------------------------


class Engine:
    """A vLLM process that answers prompts; see scripts/demo_engine.py."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Answer a prompt. `CannotRun` when the engine does not."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(prompt)) + "\n")
        self._process.stdin.flush()
        return self.wait_reply(ANSWER_DEADLINE_S)

    def wait_reply(self, deadline_s: float) -> dict[str, Any]:
        """The next line that the engine writes; `CannotRun` at the deadline or when it ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"said nothing for {deadline_s:.0f} s"
            raise CannotRun(f"vLLM {what}; its log is {self._log}")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def started_engine(store: Path, log: Path) -> Iterator[Engine]:
    """A new vLLM process with an empty memory; it is gone afterwards."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [VLLM_PYTHON, ROOT / "scripts" / "demo_engine.py", MODEL, transfer_config(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        engine = Engine(process, log)
        engine.wait_reply(START_DEADLINE_S)
        yield engine
        assert process.stdin is not None
        process.stdin.close()
        process.wait(ANSWER_DEADLINE_S)
    finally:
        process.kill()
        process.wait()


def transfer_config(store: Path) -> str:
    """vLLM's side of `kvfs config vllm`."""
    return json.dumps(vllm_transfer_config(store))


# What is shown ----------------------------------------------------------------------------------


def tokens_of(seed: int, count: int) -> list[int]:
    """The token ids of a text of exactly `count` tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = " ".join(sentences(count // 4, seed))
    ids = tokenizer.encode(text).ids[:count]
    assert len(ids) == count
    return list(ids)


def chunk_files(mountpoint: Path) -> set[Path]:
    """The chunk files of the demo's model, as anyone finds them in the mount."""
    return set(mountpoint.glob(f"kv/{MODEL.name}@*/*/*.safetensors"))


def wait_stored(mountpoint: Path, count: int) -> None:
    """Return when that many chunk files are there; storing goes on behind the answer."""
    end_s = time.monotonic() + STORE_DEADLINE_S
    while len(chunk_files(mountpoint)) < count:
        if time.monotonic() > end_s:
            found = len(chunk_files(mountpoint))
            raise CannotRun(f"vLLM stored {found} chunks instead of {count}; see {DEMO}")
        time.sleep(0.05)


def answer_once(mountpoint: Path, store: Path, prompt: list[int], name: str) -> dict[str, Any]:
    """Start an engine, warm it up, forget the warm-up, answer the prompt.

    The first prompt of its length is slow on any engine, whatever the cache does. So another one
    goes first, and its files are removed: they are ordinary files.
    """
    before = chunk_files(mountpoint)
    chunks = len(prompt) // CHUNK_TOKENS
    with started_engine(store, DEMO / f"{name}.log") as engine:
        warm_up = tokens_of(seed=1000 + len(before), count=len(prompt))
        for _ in range(2):
            engine.ask(warm_up)
            wait_stored(mountpoint, len(before) + chunks)
        for file in chunk_files(mountpoint) - before:
            file.unlink()
        drop_page_cache()
        reply = engine.ask(prompt)
        wait_stored(mountpoint, chunks)
    return reply


def show_first_result(mountpoint: Path, store: Path, tokens: int) -> None:
    """The demo itself."""
    say("1/4  Making a small random model (105M parameters; nothing is downloaded)")
    builder = ROOT / "scripts" / "build_demo_model.py"
    subprocess.run(
        [VLLM_PYTHON, builder, MODEL],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=START_DEADLINE_S,
    )
    say(f"2/4  Mounting {store} at {mountpoint}")
    ensure_mounted(mountpoint, store)
    for file in chunk_files(mountpoint):  # of an earlier run: the first answer is to be computed
        file.unlink()

    prompt = tokens_of(seed=1, count=tokens)
    say(f"3/4  vLLM answers a prompt of {tokens:,} tokens, and computes all of it")
    cold = answer_once(mountpoint, store, prompt, "first-engine")
    say("4/4  A new vLLM process answers the same prompt, page cache dropped, from files")
    hit = answer_once(mountpoint, store, prompt, "second-engine")

    cold_s, hit_s = cold["first_token_s"], hit["first_token_s"]
    say("")
    say(f"  time to first token, computed     {cold_s:7.3f} s")
    say(
        f"  time to first token, from files   {hit_s:7.3f} s   "
        f"({hit['cached_tokens']:,} of {tokens:,} tokens)"
    )
    if hit["cached_tokens"] + CHUNK_TOKENS < tokens:
        raise CannotRun(f"the second vLLM did not find its prompt; see {DEMO}/second-engine.log")
    if hit["tokens"] != cold["tokens"]:
        raise CannotRun(f"the two answers differ, which is a defect of kvfs; see {DEMO}")
    say(f"  that is {hit_s / cold_s:.1%} of the time, with the same answer (float32)")
    say("")
    say("Which prefixes are cached (kvfs prefixes):")
    say("")
    say(run_kvfs("prefixes", "--store", store, "--tokenizer", MODEL, capture=True).rstrip())


def say_what_next(mountpoint: Path, store: Path) -> None:
    """Commands to copy, and how to stop."""
    shell = os.path.relpath(KVFS)
    place, home = os.path.relpath(mountpoint), os.path.relpath(store)
    rows = [
        (f"{shell} status --store {home}", "room, files, counters"),
        (f"ls {place}/kv/*/*/", "the cache as files; rm is eviction, cp is a copy"),
        (f"ls -R {place}/.kvfs/prefixes", "the same as a tree of prompts, each with its text"),
        (f"{shell} verify --store {home}", "check every byte against its digest"),
        (f"{shell} config vllm --model MODEL", "run your own vLLM with this cache"),
        (f"{shell} config lmcache --model MODEL", "or LMCache on the mount"),
        ("make stop", "unmount; the files stay"),
    ]
    width = max(len(command) for command, _ in rows)
    say("")
    say("The mount stays up. What to try next:")
    say("")
    for command, purpose in rows:
        say(f"  {command:<{width}}   {purpose}")


def main() -> int:
    """Show the first result, or stop what an earlier call left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--store", type=Path, default=DEMO / "store")
    parser.add_argument("--mountpoint", type=Path, default=DEMO / "mnt")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--stop", action="store_true", help="unmount and leave")
    arguments = parser.parse_args()
    mountpoint, store = arguments.mountpoint.absolute(), arguments.store.absolute()
    if not CHUNK_TOKENS <= arguments.tokens <= 4000:
        parser.error(f"--tokens must be {CHUNK_TOKENS} to 4000")
    try:
        if arguments.stop:
            stop(mountpoint)
            return 0
        check_machine()
        DEMO.mkdir(exist_ok=True)
        show_first_result(mountpoint, store, arguments.tokens)
        say_what_next(mountpoint, store)
    except (CannotRun, OSError, subprocess.SubprocessError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
