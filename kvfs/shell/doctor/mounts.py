"""Mounts of kvfs that run, or should."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvfs.errors import KvfsError
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.locate import FindMounts

STAT_DEADLINE_S = 2.0
STATUS_DEADLINE_S = 2.0


def check_mounts(find_mounts: FindMounts) -> Iterator[Finding]:
    """Mounts of kvfs that no process serves any more, or that do not answer."""
    from mount.point import probe

    for mount in find_mounts():
        name = f"mount {mount.mountpoint}"
        code = probe(mount.mountpoint, STAT_DEADLINE_S)
        if code == 0:
            yield Finding(name, Level.OK, f"serves {mount.store}{_shown_as(mount.store)}")
        elif code == errno.ENOTCONN:
            advice = f"run `kvfs umount {mount.mountpoint}`, or mount it again"
            yield Finding(name, Level.FAIL, "its node has died", advice)
        elif code is None:
            advice = (
                f"run `kvfs umount --lazy {mount.mountpoint}` and look at {mount.store}/node.log"
            )
            yield Finding(name, Level.FAIL, f"no answer within {STAT_DEADLINE_S:g} s", advice)
        else:
            yield Finding(name, Level.WARN, os.strerror(code), "mounted for another user")


def _shown_as(store: Path) -> str:
    """What is unusual about how a store's mount shows files, as its node says."""
    from kvfs.client import Client

    try:
        with Client(store, deadline_s=STATUS_DEADLINE_S) as client:
            mount = client.status()["mount"] or {}
    except KvfsError:
        return ""
    is_symlink = mount.get("reads") == "symlink"
    return ", published files as symbolic links to their blobs" if is_symlink else ""
