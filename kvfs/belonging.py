"""Which cluster a store belongs to, as the store itself says: `meta/cluster`.

What lies there besides decides what a start must do. A database without the mark is of a store that
was alone: its names mean nothing in a cluster before they are brought in
(`kvfs.cluster.adoption`), so that it is set aside. A mark without a database is of a node that has
lost what it knew of its own files (`kvfs.cluster.search`). It takes another id then: whoever counts
on copies of the old one is told nothing wrong by it.

The mark is written once the node is a member. Until then `meta/joining` says what a start has
changed, so that one that fails, or is killed, can be undone: `undo_join`.
"""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kvfs.config import CLUSTER_FORMER_MAX
from kvfs.errors import InvalidInput
from kvfs.meta.url import without_password
from kvfs.settings.words import ClusterConfig

CLUSTER_MARK = "cluster"  # in the directory `meta` of a store
JOINING = "joining"  # in its place until the node is a member
ALONE = "alone"  # beside it: a directory with the database that was set aside
RUNNING = "running"  # there while the database has what is not synced
_DATABASE = "data.mdb"
_Mark = TypeVar("_Mark")


@dataclass(frozen=True, slots=True)
class Belonging:
    """What the mark says."""

    cluster: str
    metadata: str  # URL of the names, without a password: for people
    node_id: bytes
    former_ids: tuple[bytes, ...] = ()  # of nodes whose files these were, and which are no more
    is_searched: bool = False  # the database knows all files that lie in the directories


def read_belonging(home: Path) -> Belonging | None:
    """None for a store that is alone. Raises `InvalidInput` for a mark that is none."""
    mark = home / "meta" / CLUSTER_MARK
    advice = "move it away, and start with --join URL once more"
    return _read(mark, _unpack, advice)


def write_belonging(home: Path, belonging: Belonging) -> None:
    """Write the mark whole or not at all; it is on the disk then."""
    _write(home / "meta" / CLUSTER_MARK, _pack(belonging))


def settle_alone(home: Path) -> None:
    """Before a node for itself opens its metadata: refuse a store of a cluster, whose database
    would show a part of the names at best. Raises `InvalidInput`."""
    meta = home / "meta"
    aside, database = meta / ALONE / _DATABASE, meta / _DATABASE
    is_aside = aside.exists() and not database.exists()
    found = read_belonging(home)
    if found is not None:
        # Earlier versions wrote the mark before they asked the server: it was never a member.
        if not is_aside or found.is_searched or found.former_ids:
            raise InvalidInput(str(home), advice_alone(home, found))
        (meta / CLUSTER_MARK).unlink()
    if is_aside:
        (meta / RUNNING).unlink(missing_ok=True)  # it was synced before it was set aside
        aside.rename(database)
        _sync_directory(meta)


def advice_alone(home: Path, found: Belonging) -> str:
    """What to do with a store of a cluster that was started without it, in one line."""
    return (
        f"belongs to the cluster {found.cluster}, and its node is not running: start it with kvfs"
        f" mount or kvfs serve --store {home} --join {found.metadata} (with user and password, if"
        f" the server wants them), or write [cluster] in {home}/kvfs.toml"
    )


def settle_in_cluster(home: Path, cluster: ClusterConfig) -> Belonging:
    """Before a node of a cluster opens its metadata: what it is there. A database of something else
    is set aside, for `aside_of`. `confirm_join` makes it last, or `undo_join` takes it back."""
    found = read_belonging(home)
    database = home / "meta" / _DATABASE
    shown = without_password(cluster.metadata)
    if found is None or found.cluster != cluster.name:
        belonging = Belonging(cluster.name, shown, _new_id())
    elif database.exists():
        return replace(found, metadata=shown)
    else:
        former = (*found.former_ids, found.node_id)[-CLUSTER_FORMER_MAX:]
        belonging = Belonging(cluster.name, shown, _new_id(), former)
    _begin_join(home / "meta", belonging)
    return belonging


def confirm_join(home: Path, belonging: Belonging) -> None:
    """The node is a member: the store belongs to the cluster from now on."""
    if read_belonging(home) != belonging:
        write_belonging(home, belonging)
    (home / "meta" / JOINING).unlink(missing_ok=True)


def undo_join(home: Path) -> None:
    """Put back what a start changed that was no member yet when it ended; for who holds the store's
    lock, with no database open. Nothing to do after any other start. May be cut short anywhere, and
    be done again."""
    meta = home / "meta"
    advice = f"if {meta} has no {_DATABASE}, move that of {meta}/{ALONE} there, then remove this"
    begun = _read(meta / JOINING, _unpack_begun, advice)
    if begun is None:
        return
    mark = read_belonging(home)
    if mark is None or mark.node_id != begun.node_id:
        _put_back(meta, begun.aside)
    (meta / JOINING).unlink()
    _sync_directory(meta)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What `meta/joining` says."""

    node_id: bytes
    aside: str  # the directory where the database of before is; empty: there was none


def _begin_join(meta: Path, belonging: Belonging) -> None:
    """Set the database aside. On the disk before the name says so: one that was not synced is not
    trusted after a crash of the machine, and nobody would look at this one again."""
    database, place = meta / _DATABASE, None
    if database.exists():
        _sync_file(database)
        place, number = meta / ALONE, 1
        while (place / _DATABASE).exists():  # of a cluster that it was in before, and left
            number += 1
            place = meta / f"{ALONE}-{number}"
        place.mkdir(mode=0o700, exist_ok=True)
    _write(meta / JOINING, {**_pack(belonging), "aside": place.name if place else ""})
    if place is not None:
        database.rename(place / _DATABASE)
        (meta / "lock.mdb").unlink(missing_ok=True)
        for directory in (place, meta):
            _sync_directory(directory)


def _put_back(meta: Path, aside: str) -> None:
    database = meta / _DATABASE
    place = meta / aside if aside else None
    if place is not None and not (place / _DATABASE).exists():
        return  # it was not set aside yet, or is back
    (meta / RUNNING).unlink(missing_ok=True)  # of the database that goes; the other was synced
    (meta / "lock.mdb").unlink(missing_ok=True)
    if place is None:
        database.unlink(missing_ok=True)
        return
    (place / _DATABASE).rename(database)
    if not any(place.iterdir()):
        place.rmdir()


def aside_of(home: Path) -> list[Path]:
    """The directories with databases that were set aside and are to be brought in."""
    return sorted(path.parent for path in (home / "meta").glob(f"{ALONE}*/{_DATABASE}"))


def _pack(belonging: Belonging) -> dict[str, object]:
    return {
        "cluster": belonging.cluster,
        "metadata": belonging.metadata,
        "node": belonging.node_id.hex(),
        "former": [node_id.hex() for node_id in belonging.former_ids],
        "searched": belonging.is_searched,
    }


def _unpack(table: dict[str, Any]) -> Belonging:
    return Belonging(
        str(table["cluster"]),
        str(table["metadata"]),
        bytes.fromhex(table["node"]),
        tuple(map(bytes.fromhex, table["former"])),
        bool(table["searched"]),
    )


def _unpack_begun(table: dict[str, Any]) -> _Begun:
    aside = str(table["aside"])
    if os.sep in aside:
        raise ValueError(aside)
    return _Begun(bytes.fromhex(table["node"]), aside)


def _read(mark: Path, unpack: Callable[[dict[str, Any]], _Mark], advice: str) -> _Mark | None:
    """None where there is none. Raises `InvalidInput` for one that is damaged."""
    try:
        return unpack(json.loads(mark.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(str(mark), f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(str(mark), f"is damaged; {advice}") from error


def _write(mark: Path, table: dict[str, object]) -> None:
    """Whole or not at all, and on the disk then."""
    draft = mark.with_name(f"{mark.name}.new")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(json.dumps(table) + "\n")
        file.flush()
        os.fsync(fd)
    draft.rename(mark)
    _sync_directory(mark.parent)


def _new_id() -> bytes:
    return secrets.token_bytes(16)


def _sync_file(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
