"""A directory's mark, `store.json`: the version of its store, and the id that it is known by."""

import fcntl
import json
import os
import re
import secrets
from pathlib import Path

from kvfs.config import STORE_VERSION
from kvfs.errors import InvalidInput
from kvfs.home import NOT_FOREIGN, STORE_MARK, has_lost_mark

_STORE_ID = re.compile("[0-9A-Za-z_-]{1,64}")  # it becomes a part of file names


def read_mark(path: Path) -> str:
    """The id of a store directory. Raises `InvalidInput` when the mark is none or of another
    version."""
    mark = path / STORE_MARK
    try:
        table = json.loads(mark.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(mark), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict) or not _is_store_id(table.get("id")):
        raise InvalidInput(
            str(mark),
            'is damaged: it must hold {"version": 1, "id": "<16 hex digits>"};'
            " restore it, or move it away and let kvfs init make it again",
        )
    version, store_id = table.get("version"), str(table["id"])
    if version != STORE_VERSION:
        raise InvalidInput(str(mark), f"is of version {version}; this kvfs reads {STORE_VERSION}")
    return store_id


def make_mark(path: Path) -> None:
    """Make an empty store of a directory that is missing or empty. Raises `InvalidInput`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {item.name for item in os.scandir(path)}
    except OSError as error:
        raise _unfit(path, error) from error
    if has_lost_mark(path):
        raise InvalidInput(
            str(path),
            f"has lost its {STORE_MARK}; kvfs init {path} makes it again and keeps what is stored",
        )
    foreign = {name for name in names - NOT_FOREIGN if not name.startswith(f".{STORE_MARK}.")}
    if foreign:
        raise InvalidInput(
            str(path), f"holds other files ({sorted(foreign)[0]}); name an empty directory"
        )
    write_mark(path, new_store_id())


def new_store_id() -> str:
    """An id that no other directory has."""
    return secrets.token_hex(8)


def write_mark(path: Path, store_id: str) -> None:
    """Write a mark whole or not at all. Raises `InvalidInput`."""
    if not _is_store_id(store_id):
        raise InvalidInput(str(path), f"{store_id!r:.80} is no id of a store")
    table = {"version": STORE_VERSION, "id": store_id}
    draft = path / f".{STORE_MARK}.{secrets.token_hex(4)}"
    try:
        draft.write_text(json.dumps(table) + "\n", encoding="utf-8")
        os.rename(draft, path / STORE_MARK)
    except OSError as error:
        raise _unfit(path, error) from error


def is_owned(path: Path) -> bool:
    """Whether a node holds the lock of a store's directory, which is on its mark."""
    try:
        fd = os.open(path / STORE_MARK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # no store yet, or not for us: taking it says which
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_store_id(value: object) -> bool:
    return isinstance(value, str) and _STORE_ID.fullmatch(value) is not None


def _unfit(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(str(path), f"cannot hold a store: {error.strerror}")
