"""Mounts of kvfs that run, or should."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfs.errors import KvfsError
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.doctor.node import check_node
from kvfs.shell.locate import FindMounts
from kvfs.shell.render import count_text

STAT_DEADLINE_S = 2.0
STATUS_DEADLINE_S = 2.0


def check_mounts(find_mounts: FindMounts) -> Iterator[Finding]:
    """Mounts of kvfs that no process serves any more, or that do not answer."""
    from mount.point import probe

    for mount in find_mounts():
        name = f"mount {mount.mountpoint}"
        code = probe(mount.mountpoint, STAT_DEADLINE_S)
        said = _status(mount.store) if code in (0, errno.EACCES) else {}
        if code == 0 and not os.path.lexists(mount.store):
            advice = (
                f"run `kvfs umount {mount.mountpoint}`, then mount it anew: what it had is gone"
            )
            yield Finding(name, Level.FAIL, f"its store {mount.store} was removed", advice)
        elif code == 0 or said:
            yield Finding(name, Level.OK, f"serves {mount.store}{_shown_as(said)}")
            if why := said.get("unsettled_why"):
                waiting = count_text(said["unsettled_files"], "closed file")
                found = f"{waiting} cannot be stored yet: {why}"
                advice = "see to its disk; they are tried again every few seconds, and by a start"
                yield Finding(name, Level.FAIL, found, advice)
        elif code == errno.ENOTCONN:
            advice = f"run `kvfs umount {mount.mountpoint}`, or mount it again"
            yield Finding(name, Level.FAIL, "its node has died", advice)
        elif code is None:
            advice = (
                f"run `kvfs umount --lazy {mount.mountpoint}` and look at {mount.store}/node.log"
            )
            yield Finding(name, Level.FAIL, f"no answer within {STAT_DEADLINE_S:g} s", advice)
        elif code == errno.EACCES:
            yield _of_another(name, mount.mountpoint, mount.store)
        else:
            yield Finding(name, Level.WARN, os.strerror(code), "mounted for another user")


def _of_another(name: str, mountpoint: Path, store: Path) -> Finding:
    """A mount that the kernel shows only to who made it, and whose node says nothing to us."""
    if not os.access(store, os.X_OK) or check_node(store)[0]:
        advice = "run `kvfs doctor` as that user"
        return Finding(name, Level.WARN, "is another user's, and shown to that one only", advice)
    advice = f"run `kvfs umount {mountpoint}` as that user or as root"
    return Finding(name, Level.FAIL, "is another user's, and its node has died", advice)


def _status(store: Path) -> dict[str, Any]:
    """What a store's node says of its mount; nothing when it does not answer."""
    from kvfs.client import Client

    try:
        with Client(store, deadline_s=STATUS_DEADLINE_S) as client:
            return client.status()["mount"] or {}
    except KvfsError:
        return {}


def _shown_as(status: dict[str, Any]) -> str:
    """What is unusual about how a mount shows files."""
    is_symlink = status.get("reads") == "symlink"
    return ", published files as symbolic links to their blobs" if is_symlink else ""
