"""Who a node is and whom it knows: its CURVE key pair, and its peers' public keys.

A key is text of 40 characters (Z85), as zmq writes it. A pair's file is readable by its owner only;
the known keys are a file of lines `key name`, where the name is for people.
"""

import os
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvfs.errors import InvalidInput
from kvfs.peers.address import Address

KEY_CHARACTERS = 40
PAIR_NAME = "peer.key"  # the file of a node's pair, in its store
_KEY_BYTES = 32
_KNOWN_BYTES_MAX = 1024 * 1024  # 10,000 peers
_PAIR_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A node's own keys. The secret one is never shown. Raises `InvalidInput` for what is none."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if not is_key(self.public) or not is_key(self.secret):
            raise InvalidInput("key pair", f"is none: a key has {KEY_CHARACTERS} characters (Z85)")


@dataclass(frozen=True, slots=True)
class Keys:
    """A node's pair, and the peers that it serves: their public keys with their names."""

    pair: KeyPair
    known: Mapping[str, str] = field(default_factory=dict)


def load_pair(path: Path) -> KeyPair:
    """The pair in a file, which is made (0600, whole or not at all) when it is missing. Raises
    `InvalidInput` for a file that others may read, or that holds no pair."""
    try:
        return read_pair(path)
    except FileNotFoundError:
        pass
    _make_pair(path)
    try:
        return read_pair(path)
    except FileNotFoundError as error:
        raise InvalidInput(str(path), "was removed while it was made") from error


def read_pair(path: Path) -> KeyPair:
    """The pair in a file. Raises `InvalidInput` as `load_pair`, and FileNotFoundError."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidInput(str(path), f"may be read by others; chmod 600 {path}")
    if status.st_uid != os.geteuid():
        raise InvalidInput(str(path), f"belongs to user {status.st_uid}, not to who runs this")
    values: dict[str, str] = {}
    for line in _read_text(path, _PAIR_BYTES_MAX).splitlines():
        name, _, value = line.partition(" = ")
        values[name.strip()] = value.strip()
    public, secret = values.get("public", ""), values.get("secret", "")
    if not is_key(secret) or zmq.curve_public(secret.encode()).decode() != public:
        raise InvalidInput(
            str(path),
            "holds no key pair; restore it, or move it away and a new pair is made, which every"
            " peer must then be told",
        )
    return KeyPair(public, secret)


def load_known(path: Path) -> dict[str, str]:
    """Public keys and their names, from a file of lines `key name`; `# ` begins a comment. Raises
    `InvalidInput` with the line."""
    known: dict[str, str] = {}
    for number, line in enumerate(_read_text(path, _KNOWN_BYTES_MAX).splitlines(), start=1):
        key, _, name = line.strip().partition(" ")
        if key in ("", "#"):
            continue
        if not is_key(key):
            raise InvalidInput(
                f"{path}:{number}",
                f"does not begin with a public key of {KEY_CHARACTERS} characters",
            )
        known[key] = name.strip()
    return known


def is_key(text: str) -> bool:
    """Whether a text is a key as zmq writes it."""
    return _decoded(text) is not None


def encode_key(key: bytes) -> str:
    """A key of 32 bytes, as text."""
    assert len(key) == _KEY_BYTES
    return z85.encode(key).decode("ascii")


def check_exposure(address: Address, keys: Keys | None, *, insecure: bool) -> None:
    """Refuse to serve strangers by accident. Raises `InvalidInput`."""
    if keys is None and not insecure and not address.is_loopback:
        raise InvalidInput(
            str(address),
            "would serve anyone who can reach it; give the node a key pair and its peers' public"
            " keys, listen on 127.0.0.1, or set insecure=True",
        )


def _make_pair(path: Path) -> None:
    """Of two that make it at a time, one pair stays, and both read that."""
    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="ascii") as file:
                file.write(f"public = {public}\nsecret = {secret}\n")
                file.flush()
                os.fsync(fd)
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be made: {error.strerror}") from error


def _read_text(path: Path, bytes_max: int) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) > bytes_max:
        raise InvalidInput(str(path), f"has more than {bytes_max} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(str(path), "is no UTF-8") from error


def _unreadable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(str(path), f"cannot be read: {error.strerror}")


def _decoded(text: str) -> bytes | None:
    if len(text) != KEY_CHARACTERS or not text.isascii():
        return None
    try:
        key = z85.decode(text)
    except (ValueError, KeyError, struct.error):
        return None
    # Some texts stand for more than four bytes in a group: one key has one text.
    return key if len(key) == _KEY_BYTES and z85.encode(key).decode("ascii") == text else None
