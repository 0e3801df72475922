"""Starts real inference servers and asks them: what benchmarks and end-to-end tests share.

Every server runs in a process group of its own, logs to a file, and is gone when its `with` block
ends; one that the main thread started is told to end when its parent was killed. Requests go over
HTTP to this machine only.
"""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

START_DEADLINE_S = 400.0
STOP_DEADLINE_S = 60.0
GROUP_DEADLINE_S = 10.0  # for what a server leaves: it unlinks shared memory
COPIED_DEADLINE_S = 300.0
REQUEST_DEADLINE_S = 300.0
QUIET_S = 0.5
QUIET_DEADLINE_S = 30.0

# A vLLM that fits a small machine without a GPU, in float32 so that outputs compare exactly.
SMALL_CPU_OPTIONS = (
    *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
)
WITH_PARENT = Path(__file__).parent / "with_parent.py"
OFFLINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
# One compute thread: a team of threads waits for its slowest, which on a busy machine is long.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prompt_tokens(count: int, seed: int) -> list[int]:
    """Token ids that mean nothing; equal arguments give equal prompts, on every Python."""
    rng = random.Random(seed)
    return [300 + int(rng.random() * 3700) for _ in range(count)]


class Server:
    """One server process, reached over HTTP. Started by its constructor, stopped by `with`."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        binaries: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.port = port
        self.log = log
        path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
        words = [str(binaries / command[0]), *command[1:]]
        if threading.current_thread() is threading.main_thread():  # another may end before us
            words = [sys.executable, "-I", "-S", str(WITH_PARENT), str(os.getpid()), *words]
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **OFFLINE, **(environment or {}), "PATH": path},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def wait_healthy(self, path: str = "/health") -> None:
        """Return when the server answers; RuntimeError with the end of its log when it does not."""
        end_s = time.monotonic() + START_DEADLINE_S
        while not self._is_healthy(path):
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended while it started:\n{self.log_tail()}")
            if time.monotonic() > end_s:
                raise RuntimeError(f"{self.name} does not answer:\n{self.log_tail()}")
            time.sleep(0.1)

    def _is_healthy(self, path: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what of its group does not end by itself. Returns when all that
        the server started is gone, and its shared memory."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait(STOP_DEADLINE_S)
        end_s = time.monotonic() + GROUP_DEADLINE_S
        while is_group_running(self.pid) and time.monotonic() < end_s:
            time.sleep(0.05)
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the group is left
        Path(f"/dev/shm/lmcache_l1_pool_{self.pid}").unlink(missing_ok=True)


@contextmanager
def vllm_on_lmcache(
    server: Sequence[str], engine: Sequence[str], logs: Path, *, binaries: Path
) -> Iterator[Server]:
    """A small vLLM beside an LMCache server, by commands without ports of HTTP; it answers."""
    http_port, vllm_port = free_port(), free_port()
    server = [*server, "--http-port", str(http_port), "--prometheus-port", str(free_port())]
    engine = [*engine, "--port", str(vllm_port), *SMALL_CPU_OPTIONS]
    log, vllm_log = logs / "lmcache.log", logs / "vllm.log"
    with (
        Server("LMCache", server, http_port, log, binaries=binaries) as lmcache,
        Server(
            "vLLM", engine, vllm_port, vllm_log, binaries=binaries, environment=ONE_THREAD
        ) as vllm,
    ):
        lmcache.wait_healthy("/healthcheck")
        vllm.wait_healthy()
        yield vllm


def is_group_running(group: int) -> bool:
    """Whether a process of it runs: one that has ended and was not waited for does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, its_group, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has gone meanwhile
        if int(its_group) == group and state not in "ZX":
            return True
    return False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a vLLM server said, and how long its first token took."""

    first_token_s: float
    cached_tokens: int
    tokens: tuple[int, ...]


def ask(server: Server, prompt: Sequence[int], *, tokens: int, model: str) -> Answer:
    """Complete a prompt greedily. Raises RuntimeError when the server refuses."""
    request = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_DEADLINE_S)
    try:
        start_s = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(request), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{server.name}: {response.status} {response.read().decode()}")
        return _read_stream(response, start_s)
    finally:
        connection.close()


def _read_stream(response: http.client.HTTPResponse, start_s: float) -> Answer:
    first_token_s = 0.0
    cached_tokens = 0
    tokens: list[int] = []
    for line in response:
        text = line.decode().strip().removeprefix("data:").strip()
        if not text or text == "[DONE]":
            continue
        event = json.loads(text)
        for choice in event.get("choices", []):
            new = choice.get("token_ids") or []
            if new and not tokens:
                first_token_s = time.perf_counter() - start_s
            tokens += new
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        cached_tokens = details.get("cached_tokens") or cached_tokens
    return Answer(first_token_s, cached_tokens, tuple(tokens))


def wait_unchanged(directory: Path, *, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Return when nothing below a directory has changed for a while: what is stored is stored.
    TimeoutError when it never is. `meanwhile` is called between two looks."""
    end_s = time.monotonic() + QUIET_DEADLINE_S
    seen: set[tuple[str, int]] = set()
    quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < QUIET_S:
        if time.monotonic() > end_s:
            raise TimeoutError(f"{directory} still changes after {QUIET_DEADLINE_S:g} s")
        meanwhile()
        now = set(files_below(directory))
        if now != seen:
            seen, quiet_since_s = now, time.monotonic()
        time.sleep(0.02)


def wait_chunks(directory: Path, count: int, chunk_bytes: int) -> None:
    """Return when so many files of at least that size lie there and nothing changes. RuntimeError
    at the deadline."""
    end_s = time.monotonic() + COPIED_DEADLINE_S
    while True:
        wait_unchanged(directory)
        found = sum(size >= chunk_bytes for _, size in files_below(directory))
        if found >= count:
            return
        if time.monotonic() > end_s:
            raise RuntimeError(f"{directory} has {found} of {count} chunks")
        time.sleep(0.5)


def remove_offload_region(engine_id: str) -> None:
    """What vLLM's tiering leaves in shared memory when its process is killed."""
    Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").unlink(missing_ok=True)


def files_below(directory: Path) -> list[tuple[str, int]]:
    """Names and sizes."""
    found = []
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            try:
                found.append((str(path), path.stat().st_size))
            except FileNotFoundError:
                continue  # renamed a moment ago
    return found
