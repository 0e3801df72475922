"""A mount's life: `kvfs mount` from its checks to the last request.

Order at the end: no more notices to the kernel (one may wait for a request), then no more requests,
then what was closed and waits is published, what was not closed is dropped, the mount is taken
down, and the node stops. Whoever ends the mount from outside (umount, fusermount) ends the request
loop, and the rest follows. Requests that do not end, on a disk that hangs, are given up: whoever
waits for them gets ECONNABORTED.
"""

import errno
import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pyfuse3
import trio

from kvfs.config import MOUNT_START_DEADLINE_S, MOUNT_STOP_DEADLINE_S
from kvfs.daemon import (
    ending_signals,
    log_to,
    settle_memory,
    start_in_background,
    take_orders,
    tell_failure,
    tell_ready,
)
from kvfs.errors import KvfsError, OwnedElsewhere, Unavailable, first_of
from kvfs.holder import describe_holder
from kvfs.home import log_of
from kvfs.life import running
from kvfs.settings.words import Config
from kvfs.supervisor import tell_supervisor
from kvfs.watchdog import loop_watch
from mount.guard import guarded
from mount.operations import Operations
from mount.owner import describe, wait_free
from mount.point import (
    SUBTYPE,
    MountEntry,
    abort,
    count_hidden,
    detach,
    find_mount,
    find_mounts,
    prepare,
    raise_read_ahead,
    source_of,
)
from mount.view import Decode, View

log = logging.getLogger(__name__)

COULD_NOT_RUN = 2
_TASKS_IDLE = 4
_TASKS_MAX = 256  # requests that are worked on together


@dataclass(frozen=True, slots=True)
class Orders:
    """All that the process behind a mount is told."""

    config: Config
    mountpoint: Path
    tokenizer: Path | None
    log: Path | None


def mount_command(
    config: Config, mountpoint: Path, foreground: bool, tokenizer: Path | None
) -> int:
    """Mount a store and return 0 when it serves (in the foreground: when it has ended cleanly).

    Raises `KvfsError` when it cannot; nothing is mounted then.
    """
    _check_device()
    made = _missing(mountpoint)
    place = prepare(mountpoint, [item.path for item in config.directories])
    hidden = count_hidden(place)
    if hidden:
        sys.stderr.write(
            f"kvfs mount: {mountpoint} is not empty: {hidden} names are hidden"
            " until it is unmounted\n"
        )
    tokenizer = tokenizer and Path(os.path.abspath(tokenizer))
    orders = Orders(config, place, tokenizer, log_of(config.home))
    has_served = False

    def ready(note: str) -> None:
        nonlocal has_served
        has_served = True
        tell_supervisor("READY=1")  # the log has said the note

    try:
        if not foreground:
            start_in_background(
                "mount",
                orders,
                orders.log or Path(os.devnull),
                MOUNT_START_DEADLINE_S,
                on_note=lambda note: sys.stderr.write(f"kvfs mount: {note}\n"),
            )
            return 0
        log_to(orders.log, echo=True)
        problem = _run(orders, ready)
        if problem is not None:
            raise problem
    except BaseException:
        if not has_served:
            _remove(made)
        raise
    return 0


def _missing(mountpoint: Path) -> list[Path]:
    """The directories that `prepare` will make, the innermost first."""
    if find_mount(mountpoint) is not None:  # which may not answer
        return []
    path = Path(os.path.abspath(mountpoint))
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    return missing


def _remove(made: Sequence[Path]) -> None:
    """Take directories away that nobody has used."""
    for path in made:
        try:
            path.rmdir()
        except OSError as error:
            log.info("%s stays: %s", path, error.strerror)
            return


def background() -> int:
    """The process that `mount_command` starts; its exit code."""
    orders: Orders = take_orders()
    log_to(orders.log, echo=False)
    has_told = False

    def ready(note: str) -> None:
        nonlocal has_told
        has_told = True
        tell_ready(note)

    problem = _run(orders, ready)
    if problem is None:
        return 0
    log.error("%s", problem)
    if not has_told:
        tell_failure(str(problem))
    return COULD_NOT_RUN


def _check_device() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        advice = _DEVICE_ADVICE.get(error.errno or 0, "load the module fuse (modprobe fuse)")
        raise Unavailable(f"/dev/fuse: {error.strerror}; {advice}") from error


_DEVICE_ADVICE = {
    errno.EACCES: "mount as root, or let this user open it (chmod 666 /dev/fuse, a rule of udev)",
    errno.EPERM: "give the container the device (docker: --device /dev/fuse)",
    errno.ENOENT: "load the module fuse (modprobe fuse), or give the container the device",
}


def _run(orders: Orders, on_ready: Callable[[str], None]) -> KvfsError | None:
    """Serve until stopped. What prevented it is returned; a bug ends the process with its trace."""
    problem: KvfsError | None = None
    try:
        decode = _load_decoder(orders.tokenizer)
        wait_free(orders.config.home, lambda: [entry.store for entry in find_mounts()])
        settle_memory()
        trio.run(
            serve_mount,
            orders.config,
            orders.mountpoint,
            decode,
            on_ready,
            instruments=loop_watch(serve_mount),
        )
    except* KvfsError as group:
        problem = first_of(group)
    return problem


def _load_decoder(tokenizer: Path | None) -> Decode | None:
    if tokenizer is None:
        return None
    from kvfs.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer).decode


async def serve_mount(
    config: Config,
    mountpoint: Path,
    decode: Decode | None = None,
    on_ready: Callable[[str], None] = lambda note: None,
) -> None:
    """Own a store and show it at a mount point until one of `ending_signals` or an unmount.
    `on_ready` gets what a person should know of it, mostly nothing."""
    with trio.open_signal_receiver(*ending_signals()) as signals:
        try:
            async with running(config) as node:
                operations = Operations(
                    node,
                    View(node, decode),
                    passthrough=config.mount.passthrough,
                    symlink=config.mount.symlink,
                )
                async with _mounted(operations, config, mountpoint) as own:
                    node.mountpoint = os.fspath(mountpoint)
                    node.describe_mount = operations.describe
                    note = "; ".join([*node.absent, *node.notices])
                    await _serve_requests(
                        operations, config, mountpoint, own, signals, lambda: on_ready(note)
                    )
        except OwnedElsewhere as error:
            raise _explain(error, config) from error


def _explain(error: OwnedElsewhere, config: Config) -> Unavailable:
    """Say how a store that another node owns is served."""
    home = os.path.realpath(config.home)
    for entry in find_mounts():
        if os.path.realpath(entry.store) == home:
            return Unavailable(
                f"{config.home} is mounted at {entry.mountpoint} already"
                f"{describe_holder(config.home)}; use that, or kvfs umount it first"
            )
    node = describe(config.home)
    if node is not None and node.mountpoint is not None:
        return Unavailable(
            f"{config.home} is served to files that are open in {node.mountpoint}, which was"
            f" unmounted; close them, or end process {node.pid}"
        )
    if node is None:
        return Unavailable(f"{error}; it does not answer: see node.log there")
    return Unavailable(f"{error} without a mount (kvfs serve); stop that first, then mount")


@asynccontextmanager
async def _mounted(
    operations: Operations, config: Config, mountpoint: Path
) -> AsyncIterator[MountEntry | None]:
    """A mount for the length of a `with` block, as the kernel lists it, if we can see that."""
    options = {"default_permissions", f"fsname={source_of(config.home)}", f"subtype={SUBTYPE}"}
    if config.mount.allow_other:
        options.add("allow_other")
    options.update(config.mount.flags)
    try:
        pyfuse3.init(operations, os.fspath(mountpoint), options)
    except RuntimeError as error:
        raise KvfsError(
            f"{mountpoint}: the kernel refuses the mount ({error}){_mount_advice(config)}"
        ) from error
    own: MountEntry | None = None
    try:
        own = find_mount(mountpoint)
        with guarded(None if own is None else own.device):
            yield own
    finally:
        try:
            operations.files.close()
            operations.lingering.drop_all()
        finally:  # whatever failed: a mount that nobody serves must not stay
            # It may have been detached, and another mount may have its place.
            pyfuse3.close(unmount=own is None or find_mount(mountpoint) == own)
            if own is not None and find_mount(mountpoint) == own:  # libfuse leaves an aborted one
                detach(own.mountpoint)
            log.info("unmounted %s", mountpoint)


def _mount_advice(config: Config) -> str:
    """What may help who is not root."""
    if os.geteuid() == 0:
        return ""
    if shutil.which("fusermount3") is None:
        return "; mounting as an ordinary user needs fusermount3: install fuse3, or mount as root"
    if config.mount.allow_other:
        return "; allow_other needs user_allow_other in /etc/fuse.conf"
    return ""


async def _serve_requests(
    operations: Operations,
    config: Config,
    mountpoint: Path,
    own: MountEntry | None,
    signals: AsyncIterator[int],
    on_ready: Callable[[], None],
) -> None:
    async with trio.open_nursery() as nursery:
        notices = trio.CancelScope()
        requests = trio.CancelScope()
        notices_ended = trio.Event()

        async def send_notices() -> None:
            with notices:
                await operations.freshness.run()
            notices_ended.set()

        async def stop_on_signal() -> None:
            async for number in signals:
                log.info("%s: stopping", signal.Signals(number).name)
                # Before any waiting: a notice may be stuck until the requests have ended.
                requests.deadline = trio.current_time() + MOUNT_STOP_DEADLINE_S
                notices.cancel()
                operations.stop_waiting()
                await notices_ended.wait()
                pyfuse3.terminate()
                return

        nursery.start_soon(send_notices)
        nursery.start_soon(operations.lingering.run)
        nursery.start_soon(operations.files.run)
        nursery.start_soon(stop_on_signal)
        nursery.start_soon(_announce, operations, config, mountpoint, on_ready)
        with requests:
            await pyfuse3.main(min_tasks=_TASKS_IDLE, max_tasks=_TASKS_MAX)
        if requests.cancelled_caught:  # no answer will come, for which a notice may wait
            log.warning("requests that did not end within %g s are given up", MOUNT_STOP_DEADLINE_S)
            if own is not None:
                abort(own)
        await operations.files.settling.settle_all()
        nursery.cancel_scope.cancel()


async def _announce(
    operations: Operations, config: Config, mountpoint: Path, on_ready: Callable[[], None]
) -> None:
    """Once the kernel has said hello: last settings, and word to whoever waits."""
    await operations.is_ready.wait()
    entry = await trio.to_thread.run_sync(find_mount, mountpoint)
    if entry is not None and not raise_read_ahead(entry.device, config.mount.read_ahead_kib):
        log.info("the kernel's read-ahead stays as it is: changing it needs root")
    why_not = operations.files.backing.why_not
    log.info("mounted %s at %s", config.home, mountpoint)
    log.info("reads: %s", f"from Python, since {why_not}" if why_not else "kernel passthrough")
    if config.mount.symlink:
        log.info("published files show as symbolic links to their blobs")
    on_ready()
