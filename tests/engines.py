"""Real vLLM engines for tests, each a process of its own that is always gone afterwards, and the
stores that they share."""

import json
import os
import random
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfs.client import Client
from kvfs.names import parse_chunk_path
from tests.files import store_at
from tests.processes import NodeProcess

PROGRAM = Path(__file__).parent / "e2e" / "programs" / "vllm_engine.py"
ROOT = Path(__file__).parent.parent
DEADLINE_S = 480.0  # the start of an engine reads 2 GB, from a disk that others may use


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Token ids that mean nothing. Equal arguments give equal prompts, and a shorter one begins a
    longer one of its seed; another seed shares no prefix."""
    rng = random.Random(seed)
    return [300 + int(rng.random() * 700) for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the engine. `cached`: prompt tokens that were not computed."""

    tokens: tuple[int, ...]
    cached: int
    first_token_s: float


class EngineProcess:
    """See `tests/e2e/programs/vllm_engine.py`. `store` None: without any connector."""

    def __init__(
        self,
        python: Path,
        model: Path,
        store: Path | None,
        log: Path,
        *,
        settings: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 4096,
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            **(options or {}),
        }
        if store is not None:
            extra = {"kvfs.store": str(store), "kvfs.start_node": False, **(settings or {})}
            arguments["kv_transfer_config"] = {
                "kv_connector": "KvfsConnector",
                "kv_connector_module_path": "gpu_bridge.vllm_connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        read_end, write_end = os.pipe()
        with open(log, "ab") as output:
            # Not in a session of its own: Linux 6.18 was seen to give all processors to the session
            # of two ranks, which poll, and none to their node, ten seconds and more.
            self._process = subprocess.Popen(
                [python, PROGRAM, str(write_end), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[write_end],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    # One thread: a team waits for its slowest, which on a busy machine is long.
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                    "OMP_NUM_THREADS": "1",
                    **(environment or {}),
                },
            )
        os.close(write_end)
        self._replies = os.fdopen(read_end, "rb", buffering=0)
        self._rest = b""

    def wait_ready(self) -> "EngineProcess":
        assert self._read() == "ready"
        return self

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Reply]:
        """Greedy answers to prompts that are there at once."""
        answers = self._call("generate", prompts=[list(p) for p in prompts], tokens=tokens)
        assert all(answer["reason"] == "length" for answer in answers), answers
        return [Reply(tuple(a["tokens"]), a["cached"] or 0, a["first_token_s"]) for a in answers]

    def ask_one(self, prompt: Sequence[int], tokens: int) -> Reply:
        return self.ask([prompt], tokens)[0]

    def begin(self, prompt: Sequence[int], tokens: int) -> None:
        """Ask without waiting for the answer."""
        self._write("generate", prompts=[list(prompt)], tokens=tokens)

    def settle(self) -> None:
        """Return when every chunk was saved and every block given back."""
        assert self._call("settle")

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        assert self._call("forget")

    def forget_all(self) -> None:
        """The same, and the connector's knowledge."""
        assert self._call("forget_all")

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self._call("metrics")
        return found

    def kill(self) -> None:
        """kill -9, as a crash does."""
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def stop(self) -> None:
        """Have it end by itself; saves are finished then."""
        self._call("stop")
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        """Gone, whatever it did."""
        if self._process.poll() is None:
            self.kill()
        self._replies.close()
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone: nobody reads what was not sent

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def _call(self, name: str, **arguments: Any) -> Any:
        self._write(name, **arguments)
        return self._read()

    def _write(self, name: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        end_s = time.monotonic() + DEADLINE_S
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._replies], [], [], max(0, end_s - time.monotonic()))
            assert ready, f"no reply in time\n{self._tail()}"
            data = self._replies.read(1 << 20)
            assert data, f"the engine ended\n{self._tail()}"
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-40:])


StartEngine = Callable[..., EngineProcess]


class Site:
    """A store with its node: the chunk files as the node names them, and the blobs behind them."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self._log = folder / "node.log"
        self.node = self._start()

    def _start(self) -> NodeProcess:
        expected = "quarantine|corrupt|missing|lost|gone"
        return NodeProcess(self.store, ["--store", str(self.store)], self._log, expected)

    def kill_node(self) -> None:
        self.node.kill()

    def start_node(self) -> None:
        self.node = self._start()

    def paths(self, first_token: int | None = None, of: Sequence[bytes] = ()) -> list[bytes]:
        """Chunk files that are there and not in `of`; those that begin at a token, or all."""
        with Client(self.store) as client:
            if client.stat(b"kv") is None:
                return []
            models = [b"kv/" + model.name for model in client.entries(b"kv")]
            folders = [m + b"/" + folder.name for m in models for folder in client.entries(m)]
            files = [f + b"/" + file.name for f in folders for file in client.entries(f)]
            chunks = {path: client.chunk(path) for path in files if path not in of}
        assert all(parse_chunk_path(path) for path in chunks)
        return [
            path
            for path, chunk in chunks.items()
            if first_token is None or (chunk is not None and chunk.token_start == first_token)
        ]

    def blob_of(self, path: bytes) -> Path:
        with Client(self.store) as client:
            (file,) = client.open([path], is_use=False)
        assert file is not None
        with file:
            return Path(os.readlink(f"/proc/self/fd/{file.fd}"))

    def publish(self, path: bytes, content: bytes) -> None:
        """Put a sound file of other content into a chunk's place."""
        store_at(self.store, path, content)

    def evict(self, path: bytes) -> None:
        with Client(self.store) as client:
            assert client.evict([path]) == 1

    def verify(self) -> None:
        """Every file has the bytes that were stored."""
        paths = self.paths()
        with Client(self.store) as client:
            assert [path for path in paths if not client.verify(path)] == []

    def quarantined(self) -> set[Path]:
        return set((self.store / "quarantine").iterdir())
