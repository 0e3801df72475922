"""Whether a store can take anything, by its limits and by what is stored."""

import os
from collections.abc import Iterator
from pathlib import Path

from kvfs.client import Client
from kvfs.errors import KvfsError
from kvfs.settings.load import load_config_of_store
from kvfs.settings.sizes import least_free_bytes
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.fullness import Full, full_directory, full_disk

STATUS_DEADLINE_S = 2.0
_CHECK = "room"


def check_takes_files(store: Path, *, is_running: bool) -> Iterator[Finding]:
    """One finding for each directory that can take nothing. `store` has settings that can be
    followed."""
    full = _told(store) if is_running else _looked(store)
    for path, why in full:
        yield Finding(_CHECK, Level.FAIL, f"{path} {why.found}", why.advice)


def _told(store: Path) -> Iterator[tuple[str, Full]]:
    """What the node says of its directories."""
    try:
        with Client(store, deadline_s=STATUS_DEADLINE_S, start=False) as client:
            directories = client.status()["directories"]
    except KvfsError:
        return  # which is said of the node
    for item in directories:
        if item["present"] and (why := full_directory(item)) is not None:
            yield item["path"], why


def _looked(store: Path) -> Iterator[tuple[str, Full]]:
    """What the next node will find. Where anything is stored, only that node knows how much may
    go."""
    for config in load_config_of_store([store]).directories:
        if not config.path.is_dir() or _holds_blobs(config.path):
            continue
        disk = os.statvfs(config.path)
        least_bytes = least_free_bytes(config.min_free, disk.f_blocks * disk.f_frsize)
        why = full_disk(disk.f_bavail * disk.f_frsize, 0, least_bytes)
        if why is not None:
            yield os.fspath(config.path), why


def _holds_blobs(directory: Path) -> bool:
    return any(files for _, _, files in os.walk(directory / "blobs"))
