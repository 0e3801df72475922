"""All checks, in the order in which a newcomer would repair what they find."""

import mmap
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvfs.home import default_store
from kvfs.shell.doctor.finding import Finding
from kvfs.shell.doctor.fuse import check_fuse_device, check_fusermount, check_passthrough
from kvfs.shell.doctor.machine import check_kernel, check_open_files, check_page_size
from kvfs.shell.doctor.mounts import check_mounts
from kvfs.shell.doctor.software import check_engines, check_packages
from kvfs.shell.doctor.store import check_store
from kvfs.shell.locate import FindMounts


def stores_to_examine(find_mounts: FindMounts) -> list[Path]:
    """All that are mounted, else the default one: when nobody says which."""
    return list(dict.fromkeys(mount.store for mount in find_mounts())) or [default_store()]


def examine(stores: Sequence[Path], find_mounts: FindMounts) -> Iterator[Finding]:
    """All findings, in the order in which a newcomer would repair them."""
    yield from check_packages()
    yield check_kernel(platform.release())
    yield check_page_size(mmap.PAGESIZE)
    yield check_fuse_device(Path("/dev/fuse"))
    yield check_fusermount(shutil.which("fusermount3"), os.geteuid() == 0)
    yield from check_passthrough()
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from check_mounts(find_mounts)
    for store in stores:
        for finding in check_store(store):
            yield replace(finding, store=store)
    yield from check_engines()
