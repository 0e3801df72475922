"""What sets one engine's chunks apart from another's."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from gpu_bridge.fingerprint import (
    EngineFacts,
    fingerprint,
    model_name,
    resolve_hash_seed,
    weights_identity,
)
from kvfs.errors import InvalidInput

FACTS = EngineFacts(
    engine="vllm 0.32.0",
    model="m",
    weights="revision abc",
    dtype="float32",
    kv_dtype="float32",
    quantization="None",
    chunk_tokens=256,
    hash_tokens=128,
    hash_algorithm="sha256",
    hash_seed="",
    kv_layout="LBHNC",
    attention_backends=("CPUAttentionBackend",),
    cpu_isa="x86_64 AVX2 amx=False",
    parallel={"tensor": 1, "pipeline": 1},
    groups=(("FullAttentionSpec", 128, None),),
    layouts=([0, [[0, ["l0", "F32", [], [4, 128, 128]]]]],),
    extra={"config": "1234", "salt": ""},
)
OTHER = {
    "chunk_tokens": 512,
    "hash_tokens": 64,
    "attention_backends": ("FlashAttentionBackend",),
    "parallel": {"tensor": 2, "pipeline": 1},
    "groups": (("SlidingWindowSpec", 128, 512),),
    "layouts": ([0, [[0, ["l0", "F32", [], [2, 128, 128]]]]],),
    "extra": {"config": "1235", "salt": ""},
}


def test_equal_facts_have_one_fingerprint_in_every_process() -> None:
    assert fingerprint(FACTS) == fingerprint(replace(FACTS))
    # A known answer: a change here makes every stored chunk unreachable. See FORMAT_VERSION.
    assert fingerprint(FACTS) == "1c6d46be55e1d23cbaad44f5c44f0e42"


@pytest.mark.parametrize("name", [field.name for field in fields(EngineFacts)])
def test_every_fact_counts(name: str) -> None:
    other = replace(FACTS, **{name: OTHER.get(name, "other")})
    assert fingerprint(other) != fingerprint(FACTS)


def test_a_random_hash_seed_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidInput, match=r"PYTHONHASHSEED: is not set.* choose the hash sha256"):
        resolve_hash_seed("xxhash", None)
    assert resolve_hash_seed("xxhash", "7") == "7"
    assert resolve_hash_seed("sha256", None) == ""
    assert resolve_hash_seed("sha256_cbor", "7") == "7"


def test_a_local_model_is_known_by_its_content_and_not_by_its_place(tmp_path: Path) -> None:
    names = ("model-1.safetensors", "model-2.safetensors", "config.json")
    for place in ("a/llama", "b/llama"):
        (tmp_path / place).mkdir(parents=True)
        for name in names:
            (tmp_path / place / name).write_bytes(name.encode() * 50_000)
    here, there = (weights_identity(str(tmp_path / p), None) for p in ("a/llama", "b/llama"))
    assert here == there
    assert model_name(str(tmp_path / "a/llama/")) == "llama"
    # Trained on: one byte in the middle, of the same size.
    file = tmp_path / "b/llama/model-2.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 + 100] ^= 1
    file.write_bytes(content)
    assert weights_identity(str(tmp_path / "b/llama"), None) != here


def test_a_model_of_a_hub_is_known_by_its_revision() -> None:
    assert model_name("org/model") == "org/model"
    assert weights_identity("org/model", "abc") != weights_identity("org/model", "abd")
