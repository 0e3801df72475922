"""The rivals of scripts/bench_rivals.py, each driven as an engine drives it. `rival_driver.py` says
how. Their packages are imported only by who uses them."""

import argparse
import hashlib
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvfs.config import MIB
from scripts.engine_rig import Server, free_port, wait_chunks

DEADLINE_S = 600.0
STEP_S = 0.002  # between two looks at what has ended: an engine's step is longer
TOKENS = 256  # in a chunk
MODEL = "test/model-7b"


class System(Protocol):
    """One of the three. Requests are numbers."""

    def store(self) -> None:
        """Put all of them into all directories; returns when everything is written."""

    def forget(self) -> None:
        """Lose what is in memory, the engine's blocks as well."""

    def begin(self, request: int) -> None:
        """It arrives; does not wait."""

    def step(self) -> list[int]:
        """The requests that have come since the last step."""

    def collect(self) -> None:
        """Copy what has come to the engine's blocks, where it is not yet."""

    def count_right(self) -> int:
        """How many requests lie in the engine's blocks as they were stored."""

    def close(self) -> None: ...


class Blocks:
    """What stands for the engine's blocks: a row for each chunk, and what belongs there."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.requests, self.chunks = arguments.requests, arguments.chunks
        size_bytes = arguments.mib * MIB
        self.names = [
            hashlib.sha256(f"chunk {row}".encode()).digest()
            for row in range(self.requests * self.chunks)
        ]
        self._one = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
        self.rows = np.zeros((len(self.names), size_bytes), np.uint8)

    def rows_of(self, request: int) -> range:
        return range(request * self.chunks, (request + 1) * self.chunks)

    def content(self, row: int) -> np.ndarray:
        """Unlike that of all other chunks."""
        content = self._one.copy()
        content[:32] = np.frombuffer(self.names[row], np.uint8)
        return content

    def forget(self) -> None:
        self.rows[:] = 0

    def count_right(self) -> int:
        return sum(
            all(np.array_equal(self.rows[row], self.content(row)) for row in self.rows_of(request))
            for request in range(self.requests)
        )


class LMCache:
    """Its server's own limits decide what is under way: 8 requests, 4 threads for each adapter."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        self._requests = arguments.requests
        self._tokens = arguments.chunks * TOKENS
        self._directories = arguments.directories
        self._chunk_bytes = arguments.mib * MIB
        self._chunks = arguments.requests * arguments.chunks
        port, http_port = free_port(), free_port()
        block_tokens = 32
        heads = arguments.mib * MIB // (TOKENS * 2 * 64 * 4 * 4)
        blocks = (self._requests + 1) * self._tokens // block_tokens
        self._client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://localhost:{port}",
                http_url=f"http://localhost:{http_port}",
                mode="cpu",
                transfer_mode="auto",
                tp_size=1,
                use_mla=False,
                num_tokens=self._tokens,
                kvcache_shape_spec=f"(2,{blocks},{block_tokens},{heads},64):float32:4",
                num_blocks=blocks,
                block_size=block_tokens,
            ),
            lambda _: None,
        )
        self._round = 0
        self._waiting: list[Any] = []
        self._come: list[Any] = []
        with ExitStack() as stack:  # so that the server ends where this fails
            server = Server(
                "LMCache",
                lmcache_command(arguments, port, http_port, free_port()),
                http_port,
                arguments.log.parent / "lmcache.log",
                binaries=Path(sys.executable).parent,
            )
            stack.enter_context(server)
            server.wait_healthy("/healthcheck")
            stack.callback(self._client.close)
            self._client.start()
            self._contexts = [self._context(number, "first") for number in range(self._requests)]
            self._digests = [self._digest(context) for context in self._contexts]
            self._started = stack.pop_all()

    def _context(self, number: int, kind: str) -> Any:
        context = self._client.create_request(number, f"{kind}-{number}", kind)
        assert context is not None and context.num_full_tokens == self._tokens
        return context

    def _digest(self, context: Any) -> Any:
        """Of each chunk, as it lies in the engine's blocks."""
        digests = self._client.compute_checksums(context, 0, self._tokens)
        assert digests is not None, "LMCache does not say what lies in the engine's blocks"
        assert len(digests) == self._tokens // TOKENS
        return digests

    def store(self) -> None:
        for context in self._contexts:
            assert not self._client.lookup(context).hit_chunks
            result = self._client.store(context, 0, self._tokens)
            assert result is not None and result.succeeded, "LMCache could not store"
            self._client.end_session(context)
        for directory in self._directories:
            wait_chunks(directory, self._chunks, self._chunk_bytes)

    def forget(self) -> None:
        self._round += 1
        for context in self._contexts:
            self._client.zero_destination(context, 0, self._tokens)

    def begin(self, request: int) -> None:
        from lmcache.cli.commands.bench.server_bench.helpers import _make_key

        context = self._context(request, f"round{self._round}")
        key = _make_key(context.token_ids, context.request_id, start=0, end=self._tokens)
        self._client._require_started().lookup(key, 1).result(timeout=DEADLINE_S)
        self._waiting.append(context)

    def step(self) -> list[int]:
        requests = self._client._require_started()
        ended = []
        for context in self._waiting[:8]:  # what it has under way; it takes them in order
            hits = requests.query_prefetch_status(context.request_id).result(timeout=DEADLINE_S)
            if hits is None:
                continue
            assert hits == context.total_chunks, f"LMCache found {hits} chunks"
            ended.append(context)
        for context in ended:
            self._waiting.remove(context)
        self._come += ended
        return [context.sequence_id for context in ended]

    def collect(self) -> None:
        for context in self._come:
            result = self._client.retrieve(context, 0, self._tokens)
            assert result is not None and result.succeeded, "LMCache could not load"
            self._client.end_session(context)
        self._come.clear()

    def count_right(self) -> int:
        found = [self._digest(context) for context in self._contexts]
        return sum(mine == stored for mine, stored in zip(found, self._digests, strict=True))

    def close(self) -> None:
        self._started.close()


def lmcache_command(
    arguments: argparse.Namespace, port: int, http_port: int, metrics_port: int
) -> list[str]:
    """A server of its multi-process mode with the directories as adapters, in their order."""
    adapters = [
        {"type": "fs_native", "base_path": str(directory), "use_odirect": arguments.odirect}
        for directory in arguments.directories
    ]
    payload_gib = arguments.requests * arguments.chunks * arguments.mib / 1024
    words = ["lmcache", "server", "--host", "localhost", "--port", str(port)]
    words += ["--http-port", str(http_port), "--prometheus-port", str(metrics_port)]
    words += ["--chunk-size", str(TOKENS), "--supported-transfer-mode", "auto"]
    words += ["--l1-size-gb", f"{payload_gib * 1.25 + 0.5:.2f}", "--eviction-policy", "LRU"]
    for adapter in adapters:
        words += ["--l2-adapter", json.dumps(adapter)]
    return words


class Vllm:
    """`TieringOffloadingManager` as vLLM's scheduler uses it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self._blocks = Blocks(arguments)
        self._directories = arguments.directories
        self._chunk_bytes = arguments.mib * MIB
        self._spec = TieringOffloadingSpec(vllm_config(arguments))
        self._manager: Any = self._spec.get_manager()
        view = self._manager.primary_tier.get_kv_memoryview()
        self._memory: Any = np.asarray(view).view(np.uint8)
        self._keys = [make_offload_key(name, 0) for name in self._blocks.names]
        self._waiting: dict[int, Any] = {}
        self._come: list[tuple[int, Any]] = []
        self._round = 0

    def store(self) -> None:
        for request in range(self._blocks.requests):
            context, keys = self._begin(request, "store"), self._keys_of(request)
            output = self._manager.prepare_store(keys, context)
            assert output is not None and len(output.keys_to_store) == len(keys)
            places = output.store_spec.chunk_ids
            for row, place in zip(self._blocks.rows_of(request), places, strict=True):
                self._memory[place] = self._blocks.content(row)
            self._manager.complete_store(keys, context)
            self._manager.on_request_finished(context)
        end_s = time.monotonic() + DEADLINE_S
        while self._manager.has_pending_work():
            assert time.monotonic() < end_s, "vLLM does not come to an end of its stores"
            self._end_step()
            time.sleep(STEP_S)
        for directory in self._directories:
            wait_chunks(directory, len(self._keys), self._chunk_bytes)

    def forget(self) -> None:
        self._round += 1
        self._manager.reset_cache()
        self._blocks.forget()

    def begin(self, request: int) -> None:
        self._waiting[request] = self._begin(request, f"round {self._round}")

    def step(self) -> list[int]:
        from vllm.v1.kv_offload.base import LookupResult

        ended = []
        come = {request for request, _ in self._come}
        for request, context in self._waiting.items():
            if request in come:
                continue
            keys = self._keys_of(request)
            found = {self._manager.lookup(key, context) for key in keys}
            assert LookupResult.MISS not in found, f"vLLM does not find request {request}"
            if found == {LookupResult.HIT}:
                spec = self._manager.prepare_load(keys, context)
                self._come.append((request, spec.chunk_ids))
                ended.append(request)
        self._end_step()
        return ended

    def collect(self) -> None:
        for request, places in self._come:
            for row, place in zip(self._blocks.rows_of(request), places, strict=True):
                self._blocks.rows[row] = self._memory[place]
            context = self._waiting.pop(request)
            self._manager.complete_load(self._keys_of(request), context)
            self._manager.on_request_finished(context)
        self._come.clear()

    def count_right(self) -> int:
        return self._blocks.count_right()

    def close(self) -> None:
        del self._memory
        self._manager.shutdown()

    def _begin(self, request: int, kind: str) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(f"{kind} {request}")
        self._manager.on_new_request(context)
        return context

    def _end_step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self._manager.on_schedule_end(ScheduleEndContext((), ()))

    def _keys_of(self, request: int) -> Any:
        rows = self._blocks.rows_of(request)
        return self._keys[rows.start : rows.stop]


def offload_region(pid: int) -> str:
    """The engine's name, which is in that of its shared memory."""
    return f"rivals-{pid}"


def vllm_config(arguments: argparse.Namespace) -> Any:
    """An engine with one worker whose chunks have the size, and a `fs` tier for each directory."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    chunks = arguments.requests * arguments.chunks
    tiers = [{"type": "fs", "root_dir": str(directory)} for directory in arguments.directories]
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, ("layer",), 0),),
        worker_kv_bytes_per_block=arguments.mib * MIB,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": (chunks + 8) * arguments.mib * MIB,
            "secondary_tiers": tiers,
        },
        engine_id=offload_region(os.getpid()),
        model=OffloadingModelConfig(MODEL, "float32"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )
