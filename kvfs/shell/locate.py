"""Which store a command means, and which namespace paths.

In this order: `--store`; a path inside a mounted kvfs; the mounted kvfs that the working directory
lies in; the only mounted kvfs; the default store. A path may lead into a mount through symbolic
links. The mount itself is never asked: one that hangs would hold us.
"""

import os
from collections.abc import Callable, Container, Sequence
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

_LINKS_MAX = 40  # on one path, as the kernel has it


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
    inside = [_place_in_mount(path, mounts) for path in paths]
    named = {found[0] for found in inside if found is not None}
    if store is not None:
        return _locate_in(store, paths, inside, mounts)
    if len({mount.store for mount in named}) > 1:
        listed = ", ".join(sorted(str(mount.mountpoint) for mount in named))
        raise InvalidInput("paths", f"lie in several mounts ({listed}); name one mount at a time")
    here = None if named else _place_in_mount(".", mounts)
    if named or here is not None:
        chosen = next((found[0] for found in [*inside, here] if found is not None), None)
        assert chosen is not None
        return Place(chosen.store, _strip(paths, inside), chosen.mountpoint)
    stores = {mount.store: mount for mount in mounts}
    if len(stores) > 1:
        listed = ", ".join(f"{mount.mountpoint} (store {mount.store})" for mount in mounts)
        raise InvalidInput("store", f"several are mounted: {listed}; choose one with --store DIR")
    if stores:
        only = next(iter(stores.values()))
        return Place(only.store, _strip(paths, inside), only.mountpoint)
    return Place(fallback(), _strip(paths, inside))


def store_mounted_at(place: str, find_mounts: FindMounts) -> Path | None:
    """The store that shows at a place itself, None where none does."""
    named = os.path.abspath(place)
    above, last = os.path.split(named)
    for mounted in find_mounts():
        if os.fspath(mounted.mountpoint) in (named, os.path.join(os.path.realpath(above), last)):
            return mounted.store
    return None


_Inside = tuple[Mounted, str]  # a mount, and what a path says below it


def _locate_in(
    store: Path,
    paths: Sequence[str],
    inside: Sequence[_Inside | None],
    mounts: Sequence[Mounted],
) -> Place:
    """The place in a store that a person named."""
    home = Path(os.path.abspath(store))
    real = os.path.realpath(home)
    own = {
        mount for mount in mounts if home == mount.store or real == os.path.realpath(mount.store)
    }
    shown = [found if found is not None and found[0] in own else None for found in inside]
    for path, found in zip(paths, inside, strict=True):
        if found is not None and found[0] not in own and os.path.isabs(path):
            raise InvalidInput(path, f"lies in the store {found[0].store}, not in --store {home}")
    at = next((mount.mountpoint for mount in mounts if mount in own), None)
    return Place(home, _strip(paths, shown), at)


def _place_in_mount(path: str, mounts: Sequence[Mounted]) -> _Inside | None:
    """The innermost mount that a path leads into, and the way from there."""
    if not mounts:
        return None
    points = {str(mount.mountpoint): mount for mount in mounts}
    try:
        full = _follow(os.path.join(os.getcwd(), path), points)
    except FileNotFoundError:  # the working directory was removed
        full = path if os.path.isabs(path) else ""
    holders = [
        point for point in points if full == point or full.startswith(os.path.join(point, ""))
    ]
    if not holders:
        return None
    innermost = max(holders, key=len)
    return points[innermost], os.path.relpath(full, innermost)


def _follow(path: str, points: Container[str]) -> str:
    """An absolute path with its symbolic links followed as far as the first mount that it leads
    into; from there on by its words alone."""
    done = "/"
    rest = path.split("/")[::-1]
    links = 0
    while rest:
        part = rest.pop()
        if part == "..":
            done = os.path.dirname(done)
        if part in ("", ".", ".."):
            continue
        done = os.path.join(done, part)
        if done in points:
            return os.path.normpath(os.path.join(done, *reversed(rest)))
        try:
            target = os.readlink(done)
        except OSError:  # no link, or nothing at all
            continue
        links += 1
        if links > _LINKS_MAX:
            return path
        done = "/" if target.startswith("/") else os.path.dirname(done)
        rest += target.split("/")[::-1]
    return done


def _strip(paths: Sequence[str], inside: Sequence[_Inside | None]) -> tuple[bytes, ...]:
    found = []
    for path, place in zip(paths, inside, strict=True):
        below = path if place is None else place[1]
        full = os.path.normpath(os.path.join("/", below))
        found.append(os.fsencode(full.lstrip("/")))
    return tuple(found)
