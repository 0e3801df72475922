"""Which cluster a store belongs to, as the store itself says: `meta/cluster`.

What lies there besides decides what a start must do. A database without the mark is of a store that
was alone: its names mean nothing in a cluster before they are brought in
(`kvfs.cluster.adoption`), so that it is set aside. A mark without a database is of a node that has
lost what it knew of its own files (`kvfs.cluster.search`). It takes another id then: whoever counts
on copies of the old one is told nothing wrong by it.
"""

import json
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from kvfs.config import CLUSTER_FORMER_MAX, ClusterConfig
from kvfs.errors import InvalidInput
from kvfs.meta.url import without_password

CLUSTER_MARK = "cluster"  # in the directory `meta` of a store
ALONE = "alone"  # beside it: a directory with the database that was set aside
_DATABASE = "data.mdb"


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
    try:
        table = json.loads(mark.read_text(encoding="utf-8"))
        return Belonging(
            str(table["cluster"]),
            str(table["metadata"]),
            bytes.fromhex(table["node"]),
            tuple(map(bytes.fromhex, table["former"])),
            bool(table["searched"]),
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(str(mark), f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(
            str(mark), "is damaged; move it away, and start with --join URL once more"
        ) from error


def write_belonging(home: Path, belonging: Belonging) -> None:
    """Write the mark whole or not at all; it is on the disk then."""
    table = {
        "cluster": belonging.cluster,
        "metadata": belonging.metadata,
        "node": belonging.node_id.hex(),
        "former": [node_id.hex() for node_id in belonging.former_ids],
        "searched": belonging.is_searched,
    }
    meta = home / "meta"
    draft = meta / f"{CLUSTER_MARK}.new"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(json.dumps(table) + "\n")
        file.flush()
        os.fsync(fd)
    draft.rename(meta / CLUSTER_MARK)
    _sync_directory(meta)


def settle_alone(home: Path) -> None:
    """Before a node for itself opens its metadata: refuse a store of a cluster, whose database
    would show a part of the names at best. Raises `InvalidInput`."""
    found = read_belonging(home)
    if found is not None:
        raise InvalidInput(str(home), advice_alone(home, found))
    aside, database = home / "meta" / ALONE / _DATABASE, home / "meta" / _DATABASE
    if aside.exists() and not database.exists():  # set aside for a join that went no further
        aside.rename(database)
        _sync_directory(home / "meta")


def advice_alone(home: Path, found: Belonging) -> str:
    """What to do with a store of a cluster that was started without it, in one line."""
    return (
        f"belongs to the cluster {found.cluster}: start it with --join {found.metadata}, or write"
        f" [cluster] in {home}/kvfs.toml; to use it alone, remove {home}/meta: chunk files get"
        " their names back, all else that lies here is given up"
    )


def settle_in_cluster(home: Path, cluster: ClusterConfig) -> Belonging:
    """Before a node of a cluster opens its metadata: what it is there, which the mark says from now
    on. A database of something else is set aside, for `aside_of`."""
    found = read_belonging(home)
    database = home / "meta" / _DATABASE
    shown = without_password(cluster.metadata)
    if found is not None and found.cluster == cluster.name:
        if database.exists():
            belonging = replace(found, metadata=shown)
        else:
            former = (*found.former_ids, found.node_id)[-CLUSTER_FORMER_MAX:]
            belonging = Belonging(cluster.name, shown, _new_id(), former)
    else:
        if database.exists():
            _set_aside(home / "meta")
        belonging = Belonging(cluster.name, shown, _new_id())
    if belonging != found:
        write_belonging(home, belonging)
    return belonging


def aside_of(home: Path) -> list[Path]:
    """The directories with databases that were set aside and are to be brought in."""
    return sorted(path.parent for path in (home / "meta").glob(f"{ALONE}*/{_DATABASE}"))


def _set_aside(meta: Path) -> None:
    """On the disk before the name says so: a database that was not synced is not trusted after a
    crash of the machine, and nobody would look at this one again."""
    fd = os.open(meta / _DATABASE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    place, number = meta / ALONE, 1
    while (place / _DATABASE).exists():  # of a cluster that it was in before, and left in between
        number += 1
        place = meta / f"{ALONE}-{number}"
    place.mkdir(mode=0o700, exist_ok=True)
    (meta / _DATABASE).rename(place / _DATABASE)
    (meta / "lock.mdb").unlink(missing_ok=True)
    for directory in (place, meta):
        _sync_directory(directory)


def _new_id() -> bytes:
    return secrets.token_bytes(16)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
