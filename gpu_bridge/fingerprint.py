"""The fingerprint: everything that makes one engine's bytes wrong for another, as one short text.

Two engines share chunks exactly when their fingerprints are equal. When in doubt a field goes in: a
field too many costs a cold start, one too few costs wrong answers.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from kvfs.errors import InvalidInput
from kvfs.names import FingerprintField, fingerprint_of

FORMAT_VERSION = 1  # of what the bridge puts into a chunk; raise it when that changes

# Prefix hashes that start from a random seed in every process unless one is set.
_SEEDED_HASHES = ("xxhash", "xxhash_cbor")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What goes into a fingerprint. `weights`: what tells one set of weights from another (a
    revision, or samples of the files); `layouts`: each shard's groups, layer by layer."""

    engine: str
    model: str
    weights: str
    dtype: str
    kv_dtype: str
    quantization: str
    chunk_tokens: int
    hash_tokens: int
    hash_algorithm: str
    hash_seed: str
    kv_layout: str
    attention_backends: tuple[str, ...]
    cpu_isa: str
    parallel: Mapping[str, int]
    groups: tuple[tuple[FingerprintField, ...], ...]
    layouts: tuple[FingerprintField, ...]
    extra: Mapping[str, FingerprintField]


def fingerprint(facts: EngineFacts) -> str:
    """32 hex digits. Raises `InvalidInput` for facts that are not plain JSON."""
    fields: dict[str, FingerprintField] = {"format": FORMAT_VERSION}
    for name, value in asdict(facts).items():
        if isinstance(value, Mapping):
            fields |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            fields[name] = value
    return fingerprint_of(fields)


def resolve_hash_seed(algorithm: str, seed: str | None) -> str:
    """The seed that the engine's prefix hashes start from, as far as it is set from outside
    (PYTHONHASHSEED). Raises `InvalidInput` when every process would have its own: nothing that it
    stores could ever be found again."""
    if seed is None and algorithm in _SEEDED_HASHES:
        raise InvalidInput(
            "PYTHONHASHSEED",
            f"is not set, so the prefix hash {algorithm} differs in every process and nothing"
            " stored would be found again; set it to one number for all engines, or choose the"
            " hash sha256",
        )
    return seed or ""


def model_name(model: str) -> str:
    """What people call a model: its name on a hub, or the last part of a local path."""
    return os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model


def weights_identity(model: str, revision: str | None) -> str:
    """What tells a model's weights from another's: samples of the files of a local model, else the
    revision. May block (reads some hundred KiB per file)."""
    folder = Path(model)
    if not folder.is_dir():
        return f"revision {revision}"
    files = sorted(f for f in folder.iterdir() if f.suffix in _WEIGHT_SUFFIXES and f.is_file())
    return f"files {_digest_of_samples(files)}"


def _digest_of_samples(files: Iterable[Path]) -> str:
    """A digest of names, sizes, and bytes from start, middle and end of each file: cheap, and
    different after any training, which changes all weights a little."""
    hasher = xxhash.xxh3_128()
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
            hasher.update(f"{file.name}\0{size_bytes}\0".encode())
            for offset in (0, size_bytes // 2, max(0, size_bytes - _SAMPLE_BYTES)):
                hasher.update(os.pread(opened.fileno(), _SAMPLE_BYTES, offset))
    return hasher.hexdigest()
