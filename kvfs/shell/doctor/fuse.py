"""What a mount needs: the kernel's device, the helper, and a libfuse that can do passthrough."""

import ctypes
import ctypes.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.doctor.software import parse_version

PASSTHROUGH_LIBFUSE = (3, 17)
_CAP_SYS_ADMIN_BIT = 21


def check_fuse_device(device: Path) -> Finding:
    """The device that every FUSE mount opens."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        advice = "run `modprobe fuse`; in a container pass `--device /dev/fuse`"
        return Finding("fuse device", Level.FAIL, f"no {device}", advice)
    except OSError as error:
        advice = "in a container add `--device /dev/fuse --cap-add SYS_ADMIN`"
        return Finding("fuse device", Level.FAIL, f"{device}: {error.strerror}", advice)
    return Finding("fuse device", Level.OK, str(device))


def check_fusermount(path: str | None, is_root: bool) -> Finding:
    """The helper that mounts for people who are not root."""
    if path is not None:
        return Finding("fusermount3", Level.OK, path)
    if is_root:
        return Finding("fusermount3", Level.OK, "not installed; root mounts without it")
    advice = "install the package fuse3"
    return Finding("fusermount3", Level.FAIL, "not installed", advice)


def check_passthrough() -> Iterator[Finding]:
    """The libfuse that pyfuse3 uses, and the capability that passthrough asks for."""
    version = libfuse_version()
    if version is None:
        advice = "`kvfs mount` needs pyfuse3 and libfuse 3"
        yield Finding("libfuse", Level.WARN, "not found", advice)
    elif parse_version(version)[:2] >= PASSTHROUGH_LIBFUSE:
        yield Finding("libfuse", Level.OK, f"{version}, can do passthrough")
        yield from check_patch()
    else:
        advice = "reads through the mount are served from Python; libfuse 3.17 or later is faster"
        yield Finding("libfuse", Level.WARN, f"{version}, without passthrough", advice)
    if has_sys_admin(Path("/proc/self/status")):
        yield Finding("capability", Level.OK, "CAP_SYS_ADMIN")
    else:
        advice = "passthrough needs it: mount as root for the full speed"
        yield Finding("capability", Level.WARN, "no CAP_SYS_ADMIN", advice)


def check_patch() -> Iterator[Finding]:
    """The pyfuse3 of this environment, which stock knows nothing of passthrough."""
    try:
        from mount.passthrough import find_obstacle
    except ImportError:
        return
    obstacle = find_obstacle()
    if obstacle is None:
        yield Finding("pyfuse3", Level.OK, "with passthrough")
    else:
        advice = "reads through the mount are served from Python"
        yield Finding("pyfuse3", Level.WARN, obstacle, advice)


def libfuse_version() -> str | None:
    """The version of the library that pyfuse3 has loaded, or that it would find."""
    try:
        import pyfuse3  # noqa: F401  its import maps the library that the mount would use
    except ImportError:
        pass
    library = _mapped_library("libfuse3.so") or ctypes.util.find_library("fuse3")
    if library is None:
        return None
    try:
        pkgversion = ctypes.CDLL(library).fuse_pkgversion
    except (OSError, AttributeError):
        return None
    pkgversion.restype = ctypes.c_char_p
    version = pkgversion()
    return version.decode("ascii", "replace") if version else None


def _mapped_library(name: str) -> str | None:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if os.path.basename(path).startswith(name):
            return "/" + path
    return None


def has_sys_admin(status_file: Path) -> bool:
    """Whether this process has CAP_SYS_ADMIN."""
    try:
        match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status_file.read_text(), re.MULTILINE)
    except OSError:
        return False
    return match is not None and bool(int(match[1], 16) >> _CAP_SYS_ADMIN_BIT & 1)
