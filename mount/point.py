"""Mount points: what is mounted where, whether it is alive, and taking it down.

The source of a kvfs mount is its store's path, so the kernel's own list of mounts
(/proc/self/mountinfo) says all that is needed, without asking a mount that may not answer, and
mount(8) finds the line of fstab that it came from. A path with characters that a mount option
cannot hold is quoted as in an URL, behind `kvfs:`.
"""

import contextlib
import ctypes
import errno
import os
import pwd
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from kvfs.config import MOUNT_PROBE_S, MOUNT_STOP_DEADLINE_S
from kvfs.errors import InvalidInput, KvfsError, Unavailable
from kvfs.holder import describe_holder
from mount.control import open_abort
from mount.owner import Owner, describe

SUBTYPE = "kvfs"
_QUOTED = "kvfs:"
_MOUNTINFO = Path("/proc/self/mountinfo")
_USER = re.compile(r"\buser_id=(\d+)")
_MNT_FORCE, _MNT_DETACH = 1, 2
_SILENCE_S = 2.0
_KILLED_S = 0.5  # within which a process that was killed shows it


@dataclass(frozen=True, slots=True)
class MountEntry:
    """A mounted kvfs, as the kernel lists it; alive or not."""

    mountpoint: Path
    store: Path
    device: str = ""  # major:minor
    uid: int = 0  # who mounted it


class Busy(KvfsError):
    """Files in the mount are open, or someone works in it."""


def source_of(store: Path) -> str:
    """What a mount of a store is called. Only what every mount option can hold."""
    path = os.fsencode(store)
    quoted = quote_from_bytes(path, safe="/:@+-_.~=")
    return quoted if quoted.encode() == path else _QUOTED + quoted


def parse_mountinfo(text: str) -> list[MountEntry]:
    """The kvfs mounts in /proc/self/mountinfo, in order: of several on one place the last shows."""
    found = []
    for line in text.splitlines():
        mounted, separator, filesystem = line.partition(" - ")
        fields, kind = mounted.split(" "), filesystem.split(" ")
        if not separator or len(fields) < 6 or len(kind) < 2 or kind[0] != f"fuse.{SUBTYPE}":
            continue
        store = _store_of(kind[1])
        if store is not None:
            uid = int(found_uid[1]) if (found_uid := _USER.search(kind[-1])) else 0
            found.append(MountEntry(Path(_unescape(fields[4])), store, fields[2], uid))
    return found


def _store_of(source: str) -> Path | None:
    """Undo `source_of`; None for what it never gives."""
    if source.startswith(_QUOTED):
        return Path(os.fsdecode(unquote_to_bytes(source.removeprefix(_QUOTED))))
    return Path(source) if source.startswith("/") else None


def _unescape(field: str) -> str:
    """Undo the kernel's \\040 for what a field cannot hold."""
    raw = os.fsencode(field)
    parts = raw.split(b"\\")
    for position, part in enumerate(parts[1:], start=1):
        digits = part[:3]
        is_octal = len(digits) == 3 and all(48 <= digit < 56 for digit in digits)
        parts[position] = bytes([int(digits, 8)]) + part[3:] if is_octal else b"\\" + part
    return os.fsdecode(b"".join(parts))


def find_mounts() -> list[MountEntry]:
    """All kvfs mounts that this process can see."""
    return parse_mountinfo(os.fsdecode(_MOUNTINFO.read_bytes()))


def find_mount(mountpoint: Path) -> MountEntry | None:
    """The kvfs that shows at a place, None when there is none. Never touches the mount itself."""
    wanted = _resolve(mountpoint)
    return next((entry for entry in reversed(find_mounts()) if entry.mountpoint == wanted), None)


def _find_shown(mountpoint: Path) -> MountEntry | None:
    """As `find_mount`; the place may also be a symbolic link to a mount."""
    return find_mount(mountpoint) or find_mount(Path(os.path.realpath(mountpoint)))


def _resolve(mountpoint: Path) -> Path:
    """A real path, without a look at its last part, which may not answer."""
    absolute = Path(os.path.abspath(mountpoint))
    return Path(os.path.realpath(absolute.parent)) / absolute.name


# Before a mount -----------------------------------------------------------------------------------
def prepare(mountpoint: Path, stores: Sequence[Path]) -> Path:
    """Make sure that a file system can be mounted at a place: the place's real path.

    A kvfs whose process has died is taken away; a missing directory is made. Raises `InvalidInput`
    and `Unavailable`, having changed nothing.
    """
    entry = _find_shown(mountpoint)
    while entry is not None:
        answer = probe(entry.mountpoint)
        if answer is None and _end_killed(entry):
            answer = probe(entry.mountpoint)
        if answer is None:
            raise Unavailable(
                f"{mountpoint}: a kvfs of {entry.store} is mounted here and does not answer"
                f"{describe_holder(entry.store)}; see node.log in its store,"
                " or take it away with kvfs umount --lazy"
            )
        if answer != errno.ENOTCONN:
            raise Unavailable(
                f"{mountpoint}: a kvfs of {entry.store} is mounted here already;"
                " kvfs umount it first"
            )
        detach(entry.mountpoint)
        entry = _find_shown(mountpoint)
    place = Path(os.path.realpath(mountpoint))
    for store in stores:
        real = Path(os.path.realpath(store))
        if place == real or place in real.parents or real in place.parents:
            raise InvalidInput(
                str(mountpoint), f"lies in or above the store {store}; mount elsewhere"
            )
    try:
        place.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InvalidInput(str(mountpoint), "is no directory; name one") from error
    except OSError as error:
        raise InvalidInput(str(mountpoint), f"cannot be made: {error.strerror}") from error
    return place


def count_hidden(mountpoint: Path) -> int:
    """How many names of a directory a mount on it will hide. One that mounts when it is listed
    (autofs) is not, since it waits for this very mount."""
    if mountpoint in find_triggers(os.fsdecode(_MOUNTINFO.read_bytes())):
        return 0
    try:
        return len(os.listdir(mountpoint))
    except OSError:
        return 0


def find_triggers(mountinfo: str) -> set[Path]:
    """The places in the text of /proc/self/mountinfo where something is mounted on demand."""
    found = set()
    for line in mountinfo.splitlines():
        mounted, _, filesystem = line.partition(" - ")
        fields = mounted.split(" ")
        if filesystem.startswith("autofs ") and len(fields) >= 6:
            found.add(Path(_unescape(fields[4])))
    return found


def probe(mountpoint: Path, deadline_s: float = MOUNT_PROBE_S) -> int | None:
    """0 when a mount answers, the errno that it gives, None when it is silent; EACCES where the
    kernel does not ask it for this user. Asked from a thread, since nothing can interrupt a
    question to a mount that hangs."""
    answers: list[int] = []

    def ask() -> None:
        while True:
            try:
                # The one question that the kernel answers by itself only to who may not ask: zeros.
                is_asked = os.statvfs(mountpoint).f_bsize > 0
                answers.append(0 if is_asked else errno.EACCES)
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue  # its process died over the question: it is dead from now on
                answers.append(error.errno or errno.EIO)
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(deadline_s)
    return answers[0] if answers else None


def _end_killed(entry: MountEntry) -> bool:
    """Have a mount fail whose process was killed and cannot go (`mount.guard`, where that was
    killed as well); whether it was such a one, which has gone then."""
    owner = Owner(entry.store)
    try:
        if not owner.is_killed:
            return False
        abort(entry)
        return owner.wait_gone(MOUNT_PROBE_S)
    finally:
        owner.close()


# After a mount ------------------------------------------------------------------------------------
def umount_command(mountpoint: Path, lazy: bool) -> int:
    """`kvfs umount`: 0 when the mount is down and its process gone, 1 when it could not be.

    Raises `KvfsError` when there is nothing to do it to.
    """
    entry = _find_shown(mountpoint)
    if entry is None:
        raise InvalidInput(str(mountpoint), "no kvfs is mounted here")
    _end_killed(entry)
    is_replaced = _is_replaced(entry)
    owner = Owner(entry.store)
    try:
        with _telling(f"waiting until {owner.shown} has written what is left, or has ended"):
            _unmount(entry.mountpoint, lazy=lazy)
    except Busy as error:
        sys.stderr.write(f"kvfs umount: {error}\n")
        return 1
    if lazy:  # its process ends when the last file in it is closed
        if not owner.wait_gone(_KILLED_S) and owner.is_killed:  # it was, a moment ago
            abort(entry)
        return 0
    if is_replaced:
        return 0
    wait_s = f"{MOUNT_STOP_DEADLINE_S:.0f} s"
    with _telling(f"unmounted; waiting up to {wait_s} for {owner.shown} to end"):
        is_gone = owner.wait_gone(MOUNT_STOP_DEADLINE_S)
    if not is_gone:
        sys.stderr.write(
            f"kvfs umount: unmounted, but {owner.shown} still runs; see {entry.store}/node.log\n"
        )
        return 1
    return 0


def _is_replaced(entry: MountEntry) -> bool:
    """Whether another process has the store of a dead mount by now, which stays."""
    node = describe(entry.store)
    if node is None or node.mountpoint == os.fspath(entry.mountpoint):
        return False
    return probe(entry.mountpoint) == errno.ENOTCONN


@contextlib.contextmanager
def _telling(line: str) -> Iterator[None]:
    """Say on standard error what a block waits for, when that takes longer than a person likes to
    wait without a word."""
    timer = threading.Timer(_SILENCE_S, sys.stderr.write, [f"kvfs umount: {line}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _unmount(mountpoint: Path, *, lazy: bool) -> None:
    """Raises `Busy`, and `KvfsError` for anything else that goes wrong."""
    if os.geteuid() == 0:
        code = _umount2(mountpoint, _MNT_DETACH if lazy else 0)
        if code == errno.EBUSY:
            raise _busy(mountpoint)
        if code:
            raise KvfsError(f"{mountpoint}: cannot be unmounted: {os.strerror(code)}")
        return
    tool = shutil.which("fusermount3") or shutil.which("fusermount")
    if tool is None:
        raise KvfsError("unmounting as an ordinary user needs fusermount3; install fuse3")
    command = [tool, "-u", *(["-z"] if lazy else []), "--", os.fspath(mountpoint)]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=MOUNT_STOP_DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise KvfsError(
            f"{mountpoint}: cannot be unmounted within {MOUNT_STOP_DEADLINE_S:.0f} s; detach it"
            " with --lazy"
        ) from error
    if done.returncode and "busy" in done.stderr.lower():
        raise _busy(mountpoint)
    entry = find_mount(mountpoint) if done.returncode else None
    if entry is not None and entry.uid != os.getuid():
        raise KvfsError(
            f"{mountpoint} was mounted by {_user_name(entry.uid)}: unmount it as that user, or as"
            " root"
        )
    if done.returncode:
        raise KvfsError(f"{mountpoint}: {done.stderr.strip() or 'cannot be unmounted'}")


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _busy(mountpoint: Path) -> Busy:
    return Busy(
        f"{mountpoint} is in use: close the files that are open in it and leave its directories,"
        " or detach it with --lazy"
    )


def detach(mountpoint: Path) -> None:
    """Take a dead mount away, whoever still holds files of it."""
    _unmount(mountpoint, lazy=True)


def abort(entry: MountEntry) -> None:
    """Let whatever waits for a mount fail, since nobody will answer. Where neither root nor the
    kernel's control files are at hand, it waits until the process has gone."""
    fd = open_abort(entry.device)
    if fd is None:
        if find_mount(entry.mountpoint) == entry:  # else it is detached, and the place another's
            _umount2(entry.mountpoint, _MNT_FORCE | _MNT_DETACH)
        return
    try:
        os.write(fd, b"1")
    except OSError:
        pass  # it has just gone
    finally:
        os.close(fd)


def _umount2(mountpoint: Path, flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mountpoint), flags) == 0:
        return 0
    return ctypes.get_errno()


def raise_read_ahead(device: str, read_ahead_kib: int) -> bool:
    """Let buffered reads of a mount come in larger requests; False where that is not allowed."""
    setting = Path(f"/sys/class/bdi/{device}/read_ahead_kb")
    try:
        setting.write_text(f"{read_ahead_kib}\n", encoding="ascii")
    except OSError:
        return False
    return True
