"""Reads vLLM's configuration (0.32): how it cuts requests into blocks, and what makes its bytes
incompatible with another engine's."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.version import __version__ as vllm_version

from gpu_bridge.fingerprint import (
    EngineFacts,
    fingerprint,
    model_name,
    resolve_hash_seed,
    weights_identity,
)
from gpu_bridge.plan import Geometry, Group, Place, resolve_chunk_tokens
from gpu_bridge.settings import BridgeSettings
from kvfs.names import FingerprintField, namespace_path

ENGINE = f"vllm {vllm_version}"

# Exactly these: a kind that derives from them may keep blocks by other rules.
_SUPPORTED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec)
# Of a model's configuration, what says nothing about its numbers.
_IRRELEVANT_CONFIG = {"_name_or_path", "_commit_hash", "transformers_version"}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What only a worker knows; it tells the scheduler once, when its memory is laid out."""

    rank: int
    layouts: tuple[tuple[int, list[list[str | int | list[int]]]], ...]
    attention_backends: tuple[str, ...]
    cpu_isa: str


def unsupported_reason(kv_cache_config: KVCacheConfig) -> str | None:
    """Why this model's cache cannot be kept in files; None when it can."""
    if not kv_cache_config.kv_cache_groups:
        return "it has no KV cache"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for spec in iter_layer_specs(group.kv_cache_spec):
            if type(spec) not in _SUPPORTED:
                return f"its KV group {index} is a {type(spec).__name__}"
            if getattr(spec, "non_causal", False):
                return f"its KV group {index} attends to later tokens"
        if not (group.kv_cache_spec.prefix_cacheable and group.enable_kv_transfer):
            return f"its KV group {index} is not made of prefixes"
        if group.host_resident:
            return f"its KV group {index} lies in host memory"
    return None


def read_geometry(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: BridgeSettings
) -> Geometry:
    """Raises `InvalidInput` when `kvfs.chunk_tokens` cuts a block."""
    parallel = vllm_config.parallel_config
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = tuple(
        Group(
            index,
            resolve_dcp_kv_block_size(group.kv_cache_spec, parallel.decode_context_parallel_size),
            _window_tokens(group.kv_cache_spec),
        )
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    chunk_tokens = resolve_chunk_tokens(
        settings.chunk_tokens, [hash_tokens, *(group.block_tokens for group in groups)]
    )
    return Geometry(chunk_tokens, hash_tokens, groups, parallel.world_size)


def _window_tokens(group_spec: KVCacheSpec) -> int | None:
    windows = [
        spec.sliding_window + spec.extra_retained_tokens
        if isinstance(spec, SlidingWindowSpec)
        else None
        for spec in iter_layer_specs(group_spec)
    ]
    known = [window for window in windows if window is not None]
    return max(known) if len(known) == len(windows) else None


def worker_facts(
    vllm_config: VllmConfig, layouts: Mapping[int, Any], layer_names: Sequence[str]
) -> WorkerFacts:
    """`layouts`: the `GroupLayout` of each group."""
    backends = get_current_attn_backends(vllm_config, list(layer_names))
    return WorkerFacts(
        rank=vllm_config.parallel_config.rank,
        layouts=tuple((index, layout.facts()) for index, layout in sorted(layouts.items())),
        attention_backends=tuple(sorted(backend.full_cls_name()[1] for backend in backends)),
        cpu_isa=_cpu_isa(),
    )


def _cpu_isa() -> str:
    """Blocks on a CPU are packed for its instructions."""
    has_amx = torch.cpu._is_amx_tile_supported()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={has_amx}"


def resolve_place(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    geometry: Geometry,
    workers: Sequence[WorkerFacts],
    salt: str,
) -> Place:
    """Where this engine's chunks lie. `salt`: empty, or text that sets this process apart from all
    others. Raises `InvalidInput`."""
    model = model_name(vllm_config.model_config.model)
    text = fingerprint(_engine_facts(vllm_config, kv_cache_config, geometry, workers, model, salt))
    return Place(namespace_path(model, text), model, text)


def check_hash_seed(vllm_config: VllmConfig) -> str:
    """See `resolve_hash_seed`."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return resolve_hash_seed(algorithm, os.environ.get("PYTHONHASHSEED"))


def _engine_facts(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    geometry: Geometry,
    workers: Sequence[WorkerFacts],
    model: str,
    salt: str,
) -> EngineFacts:
    config, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    dtype = str(config.dtype).removeprefix("torch.")
    return EngineFacts(
        engine=ENGINE,
        model=model,
        weights=_weights(vllm_config),
        dtype=dtype,
        kv_dtype=dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
        quantization=str(config.quantization),
        chunk_tokens=geometry.chunk_tokens,
        hash_tokens=geometry.hash_tokens,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=check_hash_seed(vllm_config),
        kv_layout=str(kv_cache_config.kv_cache_layout or cache.kv_cache_layout),
        attention_backends=tuple(
            sorted({name for facts in workers for name in facts.attention_backends})
        ),
        # Facts of each worker; one answer when, as usual, all run on the same kind of machine.
        cpu_isa=", ".join(sorted({facts.cpu_isa for facts in workers})),
        parallel={
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "prefill_context": parallel.prefill_context_parallel_size,
            "decode_context": parallel.decode_context_parallel_size,
            "interleave": parallel.cp_kv_cache_interleave_size,
        },
        groups=tuple(_group_facts(group) for group in kv_cache_config.kv_cache_groups),
        layouts=tuple(
            [facts.rank, [[index, list(layers)] for index, layers in facts.layouts]]
            for facts in sorted(workers, key=lambda facts: facts.rank)
        ),
        extra={
            "config": _config_digest(config.hf_config),
            "length": _length_that_counts(vllm_config),
            "speculative": _speculative(vllm_config),
            "salt": salt,
        },
    )


def _group_facts(group: KVCacheGroupSpec) -> tuple[FingerprintField, ...]:
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    return (type(spec).__name__, spec.block_size, _window_tokens(group.kv_cache_spec))


def _weights(vllm_config: VllmConfig) -> str:
    config = vllm_config.model_config
    load_format = str(vllm_config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy, seed {config.seed}"
    revision = getattr(config.hf_config, "_commit_hash", None) or config.revision
    return weights_identity(config.model, revision)


def _config_digest(config: Any) -> str:
    fields = {k: v for k, v in config.to_dict().items() if k not in _IRRELEVANT_CONFIG}
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, default=str).encode())


def _length_that_counts(vllm_config: VllmConfig) -> int | None:
    """The model's maximal length, where positions are encoded by it."""
    config = vllm_config.model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if any(word in json.dumps(rope, default=str) for word in _LENGTH_DEPENDENT_ROPE):
        return int(vllm_config.model_config.max_model_len)
    return None


def _speculative(vllm_config: VllmConfig) -> str | None:
    """A drafter's layers are in the cache too."""
    config = vllm_config.speculative_config
    if config is None:
        return None
    weights = weights_identity(config.model, config.revision) if config.model else ""
    return f"{config.method} {model_name(config.model or '')} {weights}"
