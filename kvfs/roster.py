"""Which directories belong to one store, as both sides remember it.

The first directory has the list of all (`meta/directories.json`), each of the others a mark with
the first one's id (`part.json`). Without that mark, a node that is started on a part by mistake
would see blobs that no metadata knows, and take them for garbage.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.blobs import BlobDirectory
from kvfs.errors import InvalidInput
from kvfs.home import PART_MARK
from kvfs.mark import new_store_id, write_mark
from kvfs.settings.sizes import parse_limit, show_limit
from kvfs.settings.words import DirectoryConfig

log = logging.getLogger(__name__)

ROSTER = Path("meta", "directories.json")  # below the first directory


@dataclass(frozen=True, slots=True)
class Known:
    """A directory of a store as its first one remembers it."""

    store_id: str
    config: DirectoryConfig


def read_roster(file: Path) -> list[Known]:
    """Empty when there is none yet. Raises `InvalidInput`."""
    try:
        items = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(items, list):
            raise TypeError
        return [
            Known(
                str(item["id"]),
                DirectoryConfig(
                    Path(item["path"]),
                    parse_limit(item.get("max_bytes"), "max_bytes"),
                    parse_limit(item.get("min_free"), "min_free"),
                ),
            )
            for item in items
        ]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidInput) as error:
        raise InvalidInput(
            str(file), "is damaged; remove it, and name all directories of the store once, in order"
        ) from error


def write_roster(file: Path, roster: Sequence[Known]) -> None:
    table = [
        {
            "id": item.store_id,
            "path": os.fspath(item.config.path),
            "max_bytes": show_limit(item.config.max_bytes),
            "min_free": show_limit(item.config.min_free),
        }
        for item in roster
    ]
    _write_whole(file, json.dumps(table, indent=1) + "\n")


def mark_part(part: BlobDirectory, home: BlobDirectory) -> None:
    """Let a directory say whose it is."""
    mark = part.path / PART_MARK
    text = json.dumps({"store": os.fspath(home.path), "id": home.store_id}) + "\n"
    try:
        if not mark.exists() or mark.read_text(encoding="utf-8") != text:
            _write_whole(mark, text)
    except (OSError, UnicodeDecodeError) as error:  # a full disk serves all the same
        log.warning("%s: cannot be marked as a part of %s: %s", part.path, home.path, error)


def home_of(directory: Path) -> Path:
    """The first directory of the store that a directory belongs to, itself where no mark says
    another. Raises `InvalidInput`."""
    mark = directory / PART_MARK
    try:
        return Path(str(json.loads(mark.read_text(encoding="utf-8"))["store"]))
    except FileNotFoundError:
        return directory
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(
            str(mark), 'is damaged: it must hold {"store": "<first directory>", "id": "<its id>"}'
        ) from error


def restore_mark(directory: Path) -> None:
    """Give a directory the mark that it has lost, with the id that its store knows it by. A first
    directory whose metadata is lost as well gets a new id: its names are rebuilt anyway.

    Nobody may be serving the store. Raises `InvalidInput` when the store does not know it.
    """
    home = home_of(directory)
    roster = read_roster(home / ROSTER)
    known = [item.store_id for item in roster if item.config.path == directory]
    if home == directory and roster:
        known = [roster[0].store_id]
    if not known and home != directory:
        raise InvalidInput(
            str(directory),
            f"is a part of {home}, whose meta/directories.json does not list it; write its id into"
            " store.json by hand, or give up what it holds",
        )
    write_mark(directory, known[0] if known else new_store_id())


def _write_whole(file: Path, text: str) -> None:
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return  # a full disk must not keep a node from starting
    draft = file.with_suffix(".new")
    draft.write_text(text, encoding="utf-8")
    draft.rename(file)
