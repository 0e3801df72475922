"""Ready-made configurations: the commands that make vLLM and LMCache use kvfs.

Pure text. `vllm_command`, `lmcache_server_command` and `lmcache_vllm_command` are argument lists to
run as they are; `vllm_config` and `lmcache_config` print them for a person and a shell.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

MODEL_PLACEHOLDER = "MODEL"
LMCACHE_FOLDER = "lmcache"  # below the mount point, beside the `kv` of kvfs's own connector
LMCACHE_PORT = 5555
# A multiple of every engine's block size; kvfs's own chunks have the same length.
LMCACHE_CHUNK_TOKENS = 256

Adapter = Literal["fs", "fs_native"]


def vllm_transfer_config(store: Path) -> dict[str, object]:
    """What `--kv-transfer-config` takes so that vLLM keeps its KV cache in the store."""
    return {
        "kv_connector": "KvfsConnector",
        "kv_connector_module_path": "gpu_bridge.vllm_connector",
        "kv_role": "kv_both",
        # vLLM's own default fails a request whose load failed; a miss costs time only.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvfs.store": str(store)},
    }


def lmcache_transfer_config(port: int = LMCACHE_PORT) -> dict[str, object]:
    """What `--kv-transfer-config` takes so that vLLM talks to an LMCache server."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": port,
        },
    }


def vllm_command(store: Path, model: str) -> list[str]:
    """The arguments of a vLLM server that keeps its KV cache in the store."""
    return _vllm_server(model, vllm_transfer_config(store))


def lmcache_vllm_command(model: str, port: int = LMCACHE_PORT) -> list[str]:
    """The arguments of a vLLM server that uses the LMCache server at `port`."""
    return _vllm_server(model, lmcache_transfer_config(port))


def _vllm_server(model: str, transfer: dict[str, object]) -> list[str]:
    # Not `vllm serve`: that script looks for the distribution "vllm", which CPU builds are not.
    server = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*server, "--kv-transfer-config", _compact_json(transfer)]


def lmcache_server_command(
    mountpoint: Path,
    *,
    port: int = LMCACHE_PORT,
    adapter: Adapter = "fs_native",
    memory_gib: int = 1,
) -> list[str]:
    """The arguments of an LMCache server (multi-process mode) that keeps its chunks in the mount.

    `memory_gib` is LMCache's own memory tier, in which every chunk is staged.
    """
    storage = {"type": adapter, "base_path": str(mountpoint / LMCACHE_FOLDER)}
    return [
        *("lmcache", "server", "--host", "localhost", "--port", str(port)),
        *("--chunk-size", str(LMCACHE_CHUNK_TOKENS)),
        *("--l1-size-gb", str(memory_gib), "--eviction-policy", "LRU"),
        # Without "auto" an engine on a CPU waits five minutes for a transfer that never comes.
        *("--supported-transfer-mode", "auto"),
        *("--l2-adapter", _compact_json(storage)),
    ]


def vllm_config(store: Path, model: str = MODEL_PLACEHOLDER) -> str:
    """What `kvfs config vllm` prints: one command for a shell, with what it needs as comments."""
    return "\n".join(
        [
            "# vLLM with its KV cache in kvfs. vLLM's environment needs kvfs (from a checkout:",
            "# pip install --no-deps DIRECTORY) and the packages xxhash and msgpack.",
            *_placeholder_note(model),
            _shell_text(vllm_command(store, model)),
            "",
        ]
    )


def lmcache_config(
    mountpoint: Path,
    model: str = MODEL_PLACEHOLDER,
    *,
    port: int = LMCACHE_PORT,
    adapter: Adapter = "fs_native",
) -> str:
    """What `kvfs config lmcache` prints: two commands for two shells, and LMCache's older way."""
    folder = mountpoint / LMCACHE_FOLDER
    return "\n".join(
        [
            "# LMCache with its chunks in kvfs: a server, and vLLM that uses it.",
            *_placeholder_note(model),
            "# 1. The server. Leave it running.",
            _shell_text(lmcache_server_command(mountpoint, port=port, adapter=adapter)),
            "",
            "# 2. vLLM, in another shell. Its block size must divide the chunk size.",
            _shell_text(lmcache_vllm_command(model, port)),
            "",
            "# Or inside the engine's process (needs a GPU): LMCACHE_CONFIG_FILE names a file with",
            f"#   chunk_size: {LMCACHE_CHUNK_TOKENS}",
            '#   remote_storage_plugins: ["fs"]',
            f'#   extra_config: {{"remote_storage_plugin.fs.base_path": "{folder}"}}',
            "# and vLLM's kv_connector is LMCacheConnectorV1.",
            "",
        ]
    )


def _placeholder_note(model: str) -> list[str]:
    return [f"# Put your model in the place of {model}."] if model == MODEL_PLACEHOLDER else []


def _compact_json(value: Mapping[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _shell_text(arguments: Sequence[str]) -> str:
    """Quote for a shell, with each option on a line of its own."""
    lines: list[str] = []
    for argument in arguments:
        word = shlex.quote(argument)
        if argument.startswith("--") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n  ".join(lines)
