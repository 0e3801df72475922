"""A store: whether its directory is one, what stands in it, and what is left in it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvfs.blobs import is_own
from kvfs.errors import InvalidInput
from kvfs.home import (
    FILE_KINDS,
    PARTS,
    STORE_MARK,
    check_directory,
    file_system_of,
    has_lost_mark,
    is_store,
    refuse_part,
)
from kvfs.mark import is_owned, read_mark
from kvfs.names import escape
from kvfs.roster import ROSTER, read_roster
from kvfs.settings.load import load_config_of_store
from kvfs.shell.doctor.cluster import check_cluster, cluster_of
from kvfs.shell.doctor.directories import check_directories
from kvfs.shell.doctor.disk import check_file_system, check_room, check_scratch_file
from kvfs.shell.doctor.finding import Finding, Level, go_on, trouble
from kvfs.shell.doctor.metadata import check_metadata
from kvfs.shell.doctor.metadata_server import check_metadata_server
from kvfs.shell.doctor.node import check_node
from kvfs.shell.doctor.peers import check_peers
from kvfs.shell.doctor.room import check_takes_files
from kvfs.shell.doctor.tiers import check_tiers
from kvfs.shell.render import count_text, names_text


def check_store(store: Path) -> Iterator[Finding]:
    """The store's directory: there, writable, fast, with room; its node, and what that needs of its
    cluster."""
    try:
        exists, is_ours, has_lost = store.exists(), is_store(store), has_lost_mark(store)
    except OSError as error:
        yield trouble("store", error)
        return
    if not exists:
        advice = f"`kvfs mount MOUNTPOINT --store {store}` makes it, or `kvfs init {store}`"
        yield Finding("store", Level.WARN, f"{store} does not exist yet", advice)
        return
    if has_lost:
        advice = f"`kvfs init {store}` makes it again and keeps what is stored"
        yield Finding("store", Level.FAIL, f"{store} has lost its {STORE_MARK}", advice)
        return
    if not is_ours:
        advice = f"name a store with --store, or make one with `kvfs init {store}`"
        yield Finding("store", Level.WARN, f"{store} is no store", advice)
        return
    if not os.access(store, os.R_OK | os.W_OK | os.X_OK):
        advice = "run as the store's owner, or give yourself rights to it"
        yield Finding("store", Level.FAIL, f"{store} is not writable", advice)
        return
    yield Finding("store", Level.OK, str(store))
    settings = check_configuration(store)
    yield settings
    yield from go_on("tiers", check_tiers(store))
    yield from go_on("cluster", check_cluster(store))
    joined = cluster_of(store)
    if joined is not None:
        yield from go_on("metadata server", check_metadata_server(joined))
    yield from go_on("disk", _check_disk(store))
    if settings.level is Level.OK:
        yield from go_on("directories", check_directories(store))
    is_running, finding = check_node(store)
    yield finding
    if settings.level is finding.level is Level.OK:
        yield from go_on("room", check_takes_files(store, is_running=is_running))
    if joined is not None:
        yield from go_on("peers", check_peers(store, joined, is_running=is_running))
    yield from go_on("metadata", check_metadata(store, is_running=is_running))
    is_held = is_running or is_owned(store)
    if is_held:
        yield from check_parts(store)
    yield check_staging(store, is_running=is_held)


def _check_disk(store: Path) -> Iterator[Finding]:
    yield check_file_system(file_system_of(store))
    yield check_room(store)
    yield from check_scratch_file(store)


def check_configuration(store: Path) -> Finding:
    """Whether a node could start with what the store says of itself."""
    try:
        load_config_of_store([store])  # first: it sees what would be waited for
        if os.path.lexists(store / STORE_MARK):  # else `kvfs init` made it, and nobody began it
            read_mark(store)
        read_roster(store / ROSTER)
        refuse_part(store)
    except InvalidInput as error:
        return Finding("settings", Level.FAIL, str(error), "no node starts before this is mended")
    except OSError as error:
        return trouble("settings", error)
    return Finding("settings", Level.OK, "can be followed")


def check_parts(store: Path) -> Iterator[Finding]:
    """What a node made when it began, and somebody took away since: nothing can be stored then."""
    gone = [part for part in PARTS if not os.path.lexists(store / part)]
    if gone:
        found = f"{', '.join(gone)}: removed under a running node"
        advice = "stop the node and start it again, which makes them"
        yield Finding("directories", Level.FAIL, found, advice)


def check_staging(store: Path, is_running: bool) -> Finding:
    """Files that writers left; those of a running node may be on their way. What no node makes is
    named."""
    try:
        with os.scandir(store / "staging") as items:
            names = sorted(items, key=lambda item: item.name)
        check_directory(store)
        store_id = read_mark(store) if names else ""
        foreign = [item for item in names if not is_own(item, store_id)]
    except FileNotFoundError:
        return Finding("staging", Level.OK, "none")
    except InvalidInput as error:
        return Finding("staging", Level.FAIL, str(error), "no node starts before this is mended")
    except OSError as error:
        return trouble("staging", error)
    files = count_text(len(names) - len(foreign), "file")
    advice = "`kvfs gc` removes what a node that died left, and names what is not its to remove"
    if foreign:
        shown = names_text([_describe(item) for item in foreign], len(foreign))
        found = f"{files} of nodes, and {count_text(len(foreign), 'foreign name')}: {shown}"
        return Finding("staging", Level.WARN, found, advice)
    if not names or is_running:
        return Finding("staging", Level.OK, files if names else "empty")
    return Finding("staging", Level.WARN, f"{files} that no node is writing", advice)


def _describe(item: os.DirEntry[str]) -> str:
    try:
        kind = FILE_KINDS[stat.S_IFMT(item.stat(follow_symlinks=False).st_mode)]
    except OSError as error:  # one that has just gone
        kind = str(error.strerror)
    return f"{escape(os.fsencode(item.name))} ({kind})"
