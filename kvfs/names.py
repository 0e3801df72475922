"""The path rules: which names are allowed, and where a chunk of a model lies.

Paths are bytes from the root of the namespace, without a leading slash. A chunk file is
`kv/<model>@<fingerprint>/<hh>/<key>.safetensors`, its key `<block hash>-g<group>-s<shard>`.
"""

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from kvfs.config import NAME_BYTES_MAX, PATH_BYTES_MAX
from kvfs.errors import InvalidInput

KV_DIRECTORY = b"kv"
RESERVED_NAME = b".kvfs"  # at the root: where a mount shows what the node says of itself
CHUNK_SUFFIX = b".safetensors"

BLOCK_HASH_BYTES_MAX = 64
PART_MAX = 65_535  # of KV groups and of shards
FINGERPRINT_BYTES_MAX = 64
MODEL_BYTES_MAX = 1024

_KEY = re.compile(r"([0-9a-f]{2,128})-g(0|[1-9][0-9]{0,4})-s(0|[1-9][0-9]{0,4})")
_match_key = _KEY.fullmatch
_FINGERPRINT = re.compile(rf"[0-9A-Za-z._-]{{1,{FINGERPRINT_BYTES_MAX}}}")
_MUST_ENCODE = re.compile(rb"[\x00-\x1f\x7f%/@]|\A\.")
_ENCODED = re.compile(rb"%([0-9A-F]{2})")
_DIGEST_MARK = b"%~"  # no encoding of a model holds it, so a shortened name is never another's
_CUT_ESCAPE = re.compile(rb"%[0-9A-F]?\Z")

FingerprintField = str | int | bool | None | Sequence["FingerprintField"]


# Names and paths ----------------------------------------------------------------------------------
def check_name(name: bytes) -> None:
    """Refuse what is no name of a directory entry, with `InvalidInput`."""
    if not name or name in (b".", b".."):
        raise InvalidInput(_show(name), "is no name; use any but an empty one, '.' and '..'")
    if b"/" in name or b"\0" in name:
        raise InvalidInput(_show(name), "a name must not hold '/' or NUL")
    if len(name) > NAME_BYTES_MAX:
        raise InvalidInput(_show(name), f"is longer than {NAME_BYTES_MAX} bytes")


def check_path(path: bytes | str) -> bytes:
    """The one way to write a path: no leading, doubled or trailing slash. Raises `InvalidInput`.

    `..` and `.` are refused, not resolved: what they mean depends on links. So is the root.
    """
    raw = path if isinstance(path, bytes) else _encode_text(path, "path", "surrogateescape")
    if len(raw) > PATH_BYTES_MAX:
        raise InvalidInput(_show(raw), f"is longer than {PATH_BYTES_MAX} bytes")
    parts = [part for part in raw.split(b"/") if part]
    if not parts:
        raise InvalidInput(_show(raw) or "path", "names no file; write one below the root")
    for part in parts:
        if part in (b".", b".."):
            raise InvalidInput(
                _show(raw), f"holds {_show(part)!r}, which is not followed; write the path without"
            )
        check_name(part)
    return b"/".join(parts)


def check_publishable(path: bytes | str) -> bytes:
    """As `check_path`, for what a client stores: a mount would hide what lies in its view."""
    checked = check_path(path)
    if checked.split(b"/", 1)[0] == RESERVED_NAME:
        raise InvalidInput(_show(checked), "lies in .kvfs, which the mount shows as its own")
    return checked


# Namespaces ---------------------------------------------------------------------------------------
def namespace_path(model: str, fingerprint: str) -> bytes:
    """The directory of a model's chunks: `kv/<model>@<fingerprint>`. Raises `InvalidInput`.

    Control characters, `%`, `/`, `@` and a leading `.` of the model become `%XX`. A model that
    leaves no room in one name is cut, with `%~` and the digest of the whole behind it.
    """
    raw = check_model(model)
    check_fingerprint(fingerprint)
    name = _MUST_ENCODE.sub(lambda found: b"%%%02X" % found[0][0], raw)
    room_bytes = NAME_BYTES_MAX - 1 - len(fingerprint)
    if len(name) > room_bytes:
        tail = _DIGEST_MARK + xxhash.xxh3_128_hexdigest(raw).encode()
        name = _cut(name, room_bytes - len(tail)) + tail
    return b"%b/%b@%b" % (KV_DIRECTORY, name, fingerprint.encode())


def split_namespace(path: bytes) -> tuple[str, str] | None:
    """The model and fingerprint of a directory as `namespace_path` names it; None for another.

    Of a model whose name was cut, its start, `~` and the digest: a chunk's header has it whole.
    """
    if not path.startswith(b"kv/") or len(path) > 3 + NAME_BYTES_MAX:
        return None
    name, at, tail = path[3:].rpartition(b"@")
    fingerprint = tail.decode("utf-8", "replace")
    if not at or not name or not _FINGERPRINT.fullmatch(fingerprint):
        return None
    start, mark, digest = name.partition(_DIGEST_MARK)
    model = _ENCODED.sub(lambda found: bytes((int(found[1], 16),)), start)
    if _MUST_ENCODE.sub(lambda found: b"%%%02X" % found[0][0], model) != start:
        return None
    try:
        text = model.decode()
    except UnicodeDecodeError:
        return None
    if not mark:
        return text, fingerprint
    if not re.fullmatch(rb"[0-9a-f]{32}", digest):
        return None
    return f"{text}~{digest.decode()}", fingerprint


def check_model(model: str) -> bytes:
    """A model's name as UTF-8. Raises `InvalidInput` for what is none."""
    raw = _encode_text(model, "model", "strict")
    if not 0 < len(raw) <= MODEL_BYTES_MAX:
        raise InvalidInput("model", f"must be 1 to {MODEL_BYTES_MAX} bytes of UTF-8")
    return raw


def check_fingerprint(fingerprint: str) -> None:
    """Refuse what is no fingerprint, with `InvalidInput`."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise InvalidInput(
            "fingerprint",
            f"{fingerprint[:80]!r} must be 1 to {FINGERPRINT_BYTES_MAX} letters, digits, . _ or -",
        )


def fingerprint_of(fields: Mapping[str, FingerprintField]) -> str:
    """xxh3_128, as 32 hex digits, of the fields as JSON with sorted keys, no spaces, in UTF-8.

    Raises `InvalidInput` for what JSON cannot hold.
    """
    for name in fields:
        if not isinstance(name, str):
            raise InvalidInput("fingerprint", f"the field name {name!r} must be text")
    try:
        text = json.dumps(
            dict(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput("fingerprint", f"a field is not plain JSON: {error}") from error
    return xxhash.xxh3_128_hexdigest(text)


# Chunks -------------------------------------------------------------------------------------------
def chunk_key(block_hash: bytes, group: int, shard: int) -> str:
    """The key of a chunk from the engine's hash of its last block. Raises `InvalidInput`."""
    if not 0 < len(block_hash) <= BLOCK_HASH_BYTES_MAX:
        raise InvalidInput("block hash", f"must be 1 to {BLOCK_HASH_BYTES_MAX} bytes")
    if not (0 <= group <= PART_MAX and 0 <= shard <= PART_MAX):
        raise InvalidInput(f"group {group}, shard {shard}", f"must be 0 to {PART_MAX}")
    return f"{block_hash.hex()}-g{group}-s{shard}"


def parse_key(key: str) -> tuple[bytes, int, int] | None:
    """Block hash, group and shard of a key; None for what `chunk_key` does not write."""
    found = _match_key(key)
    if found is None:
        return None
    digits, group, shard = found[1], int(found[2]), int(found[3])
    if len(digits) % 2 or group > PART_MAX or shard > PART_MAX:
        return None
    return bytes.fromhex(digits), group, shard


def chunk_path(namespace: bytes, key: str) -> bytes:
    """Where a chunk lies below its namespace directory, for a key as `chunk_key` writes it.

    Raises `InvalidInput` for text that could name another place. In an engine's look-up: 1 us.
    """
    if _match_key(key) is None:
        raise InvalidInput(f"key {key[:80]!r}", "must be <hash in hex>-g<group>-s<shard>")
    name = key.encode()
    return b"%b/%b/%b.safetensors" % (namespace, name[:2], name)


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Many keys in little room: for each block hash, in order, one of every part.

    `hashes`: joined, each of `hash_bytes`. `parts`: (group, shard). Raises `InvalidInput`.
    """

    hashes: bytes
    hash_bytes: int
    parts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not 0 < self.hash_bytes <= BLOCK_HASH_BYTES_MAX or len(self.hashes) % self.hash_bytes:
            raise InvalidInput(
                "block hashes",
                f"{len(self.hashes)} bytes cannot be cut into hashes of {self.hash_bytes}",
            )
        for group, shard in self.parts:
            if not (0 <= group <= PART_MAX and 0 <= shard <= PART_MAX):
                raise InvalidInput(f"group {group}, shard {shard}", f"must be 0 to {PART_MAX}")

    def __len__(self) -> int:
        return len(self.hashes) // self.hash_bytes * len(self.parts)

    def batches(self, limit: int) -> Iterator["ChunkKeys"]:
        """These keys in order, at most `limit` at a time but all the parts of a hash together."""
        step = max(1, limit // max(1, len(self.parts))) * self.hash_bytes
        for start in range(0, len(self.hashes), step):
            yield ChunkKeys(self.hashes[start : start + step], self.hash_bytes, self.parts)

    def file_names(self) -> list[bytes]:
        """What the files are called; their directory is the first two characters of that."""
        if not self.hashes:
            return []
        hashes = self.hashes.hex("/", self.hash_bytes).encode()
        tails = [b"-g%d-s%d.safetensors" % part for part in self.parts]
        if len(tails) == 1:  # most often, and engines wait: no step for each of them
            return (hashes.replace(b"/", tails[0] + b"/") + tails[0]).split(b"/")
        return [name + tail for name in hashes.split(b"/") for tail in tails]


def parse_chunk_path(path: bytes) -> tuple[bytes, str] | None:
    """Namespace directory and key of a chunk's path; None for any other path."""
    parts = path.rsplit(b"/", 2)
    if len(parts) != 3 or not parts[2].endswith(CHUNK_SUFFIX):
        return None
    namespace, key = parts[0], parts[2].removesuffix(CHUNK_SUFFIX).decode("ascii", "replace")
    if parts[1] != parts[2][:2] or parse_key(key) is None or split_namespace(namespace) is None:
        return None
    return namespace, key


# For people ---------------------------------------------------------------------------------------
def escape(name: bytes) -> str:
    """Show a name or path so that it is printable, one line and unambiguous.

    Every byte that is no printable UTF-8 becomes `\\xNN`, and a backslash `\\\\`.
    """
    shown = []
    for character in name.decode("utf-8", "surrogateescape"):
        code = ord(character)
        if character == "\\":
            shown.append("\\\\")
        elif 0xDC80 <= code <= 0xDCFF:
            shown.append(f"\\x{code - 0xDC00:02x}")
        elif is_printable(character):
            shown.append(character)
        else:
            shown.extend(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))
    return "".join(shown)


def is_printable(character: str) -> bool:
    """Whether a terminal shows it as itself: no control, format, surrogate or line separator."""
    return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _encode_text(text: str, subject: str, surrogates: str) -> bytes:
    try:
        return text.encode("utf-8", surrogates)
    except UnicodeEncodeError as error:
        raise InvalidInput(subject, "is no valid Unicode text") from error


def _cut(name: bytes, size_bytes: int) -> bytes:
    """The start of an encoded name, cut between characters."""
    while size_bytes and name[size_bytes] & 0xC0 == 0x80:
        size_bytes -= 1
    return _CUT_ESCAPE.sub(b"", name[:size_bytes])


def _show(name: bytes) -> str:
    return os.fsdecode(name[:80])
