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
from kvfs.config import DirectoryConfig
from kvfs.errors import InvalidInput
from kvfs.home import PART_MARK, parse_limit, show_limit

log = logging.getLogger(__name__)


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


def _write_whole(file: Path, text: str) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(text, encoding="utf-8")
    draft.rename(file)
