"""Which store a command means, and which namespace paths.

In this order: `--store`; a path inside a mounted kvfs; the only mounted kvfs; the default store.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import InvalidInput
from kvfs.home import default_store


@dataclass(frozen=True, slots=True)
class Mounted:
    """A running kvfs mount and the store it shows."""

    mountpoint: Path
    store: Path


FindMounts = Callable[[], Sequence[Mounted]]


@dataclass(frozen=True, slots=True)
class Place:
    """A store and paths from the root of its namespace, without a leading slash."""

    store: Path
    paths: tuple[bytes, ...]
    mountpoint: Path | None = None


def locate(
    store: Path | None,
    paths: Sequence[str],
    find_mounts: FindMounts,
    fallback: Callable[[], Path] = default_store,
) -> Place:
    """Find the store and its namespace paths. Raises `InvalidInput` when two stores are meant, or
    several are mounted and nothing says which."""
    mounts = find_mounts()
    inside = [_mount_of(path, mounts) for path in paths]
    named = {mount for mount in inside if mount is not None}
    if store is not None:
        home = Path(os.path.abspath(store))
        named = {mount for mount in named if mount.store == home}
        shown = [mount if mount in named else None for mount in inside]
        for path, mount in zip(paths, inside, strict=True):
            if mount is not None and mount not in named and os.path.isabs(path):
                raise InvalidInput(path, f"lies in the store {mount.store}, not in --store {home}")
        at = next((mount.mountpoint for mount in mounts if mount.store == home), None)
        return Place(home, _strip(paths, shown), at)
    if len({mount.store for mount in named}) > 1:
        listed = ", ".join(sorted(str(mount.mountpoint) for mount in named))
        raise InvalidInput("paths", f"lie in several mounts ({listed}); name one mount at a time")
    if named:
        chosen = next(mount for mount in inside if mount is not None)
        return Place(chosen.store, _strip(paths, inside), chosen.mountpoint)
    stores = {mount.store: mount for mount in mounts}
    if len(stores) > 1:
        listed = ", ".join(f"{mount.mountpoint} (store {mount.store})" for mount in mounts)
        raise InvalidInput("store", f"several are mounted: {listed}; choose one with --store DIR")
    if stores:
        only = next(iter(stores.values()))
        return Place(only.store, _strip(paths, inside), only.mountpoint)
    return Place(fallback(), _strip(paths, inside))


def _mount_of(path: str, mounts: Sequence[Mounted]) -> Mounted | None:
    """The innermost mount that a path lies in, by its words alone: asking the file system could
    wait for a mount that hangs."""
    full = os.path.abspath(path)
    holders = [
        mount
        for mount in mounts
        if full == str(mount.mountpoint) or full.startswith(os.path.join(str(mount.mountpoint), ""))
    ]
    return max(holders, key=lambda mount: len(str(mount.mountpoint)), default=None)


def _strip(paths: Sequence[str], inside: Sequence[Mounted | None]) -> tuple[bytes, ...]:
    found = []
    for path, mount in zip(paths, inside, strict=True):
        if mount is None:
            full = os.path.normpath(os.path.join("/", path))
        else:
            full = "/" + os.path.relpath(os.path.abspath(path), mount.mountpoint)
        found.append(os.fsencode(os.path.normpath(full).lstrip("/")))
    return tuple(found)
