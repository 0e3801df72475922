"""The `kvfs` command: words in, an exit code out.

0: done. 1: done, and a problem was found (bad bytes, no such path). 2: could not run. What went
wrong is one line on standard error. Each command imports what it needs when it runs, so that a
look at a store starts at once.
"""

import argparse
import errno
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvfs.errors import InvalidInput, KvfsError, NamespaceError
from kvfs.names import RESERVED_NAME, escape, is_printable
from kvfs.shell.arguments import build_parser
from kvfs.shell.mount8 import MOUNT_FAILED, USAGE, is_helper_call, parse_helper_call

if TYPE_CHECKING:
    from pathlib import Path

    from kvfs.shell.locate import Mounted, Place
    from kvfs.shell.session import Session

FOUND_PROBLEM = 1
COULD_NOT_RUN = 2
BROKEN_PIPE = 141  # as a shell reports a tool that SIGPIPE ended
INTERRUPTED = 130

Arguments = argparse.Namespace
Run = Callable[[Arguments], int]


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Never raises for anything that a person can cause."""
    if words is None:
        words = sys.argv[1:]
        if is_helper_call(os.path.basename(sys.argv[0]), words):
            return _run_for_mount8(words)
    return _run(build_parser().parse_args(words))


def _run_for_mount8(words: Sequence[str]) -> int:
    """Mount as mount(8) asks for it, with the exit codes that it knows."""
    try:
        call = parse_helper_call(words)
    except InvalidInput as error:
        return _complain("mount.fuse.kvfs", str(error), USAGE)
    if call.is_fake:
        return 0
    return MOUNT_FAILED if _run(build_parser().parse_args(call.words)) else 0


def _run(arguments: Arguments) -> int:
    for stream in (sys.stdout, sys.stderr):  # a terminal may know fewer characters than names have
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    name = f"kvfs {arguments.command}"
    try:
        code = COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Who read our output has seen enough. Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except NamespaceError as error:
        return _complain(name, str(error), FOUND_PROBLEM if _is_absence(error) else COULD_NOT_RUN)
    except KvfsError as error:
        return _complain(name, str(error), COULD_NOT_RUN)
    except OSError as error:
        subject = f"{error.filename}: " if error.filename else ""
        advice = "; run as its owner" if isinstance(error, PermissionError) else ""
        return _complain(name, f"{subject}{error.strerror or error}{advice}", COULD_NOT_RUN)


def _is_absence(error: NamespaceError) -> bool:
    return error.code in (errno.ENOENT, errno.ENOTDIR)


def _complain(name: str, text: str, code: int) -> int:
    line = "".join(c if is_printable(c) else escape(os.fsencode(c)) for c in " ".join(text.split()))
    sys.stderr.write(f"{name}: {line}\n")
    return code


def _find_mounts() -> "Sequence[Mounted]":
    """The kvfs mounts that this process can see."""
    from kvfs.shell.locate import Mounted
    from mount.point import find_mounts

    return [Mounted(item.mountpoint, item.store) for item in find_mounts()]


# Commands that look at a store --------------------------------------------------------------------
def _with_session(command: "Callable[[Session, Arguments], int]") -> Run:
    """Find the store, connect to its node (or start a short-lived one) and run a command."""

    def run(arguments: Arguments) -> int:
        from kvfs.client import Client
        from kvfs.home import STORE_MARK, has_lost_mark, is_store
        from kvfs.shell.locate import locate
        from kvfs.shell.progress import choose_progress
        from kvfs.shell.session import Session

        paths = getattr(arguments, "paths", [])
        place = locate(arguments.store, paths, _find_mounts)
        _refuse_view(place)
        if has_lost_mark(place.store):
            raise InvalidInput(
                str(place.store),
                f"has lost its {STORE_MARK}; kvfs init {place.store} makes it again and keeps what"
                " is stored",
            )
        if not is_store(place.store):
            raise InvalidInput(
                str(place.store),
                "is no kvfs store; name one with --store DIR, or make one with kvfs init",
            )
        with Client(place.store, start=True) as client:
            session = Session(
                client, place, sys.stdout, arguments.json, time.time_ns(), choose_progress()
            )
            return command(session, arguments)

    return run


def _refuse_view(place: "Place") -> None:
    """Raise `InvalidInput` for what only a mount shows, and no store holds."""
    for path in place.paths:
        if path.split(b"/", 1)[0] == RESERVED_NAME:
            at = place.mountpoint
            way = f"ls {at}/.kvfs" if at else "kvfs mount the store, then ls MOUNTPOINT/.kvfs"
            raise InvalidInput(
                escape(path),
                f"is what a mount shows of the store, and not in it; read it there, with {way} and"
                " cat",
            )


def _status(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import status

    return status.status(session)


def _top(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import top

    return top.top(session, interval_s=arguments.interval, count=arguments.count or None)


def _ls(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import files

    return files.ls(session, is_long=arguments.long)


def _show(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import show

    return show.show(session, arguments.paths[0])


def _du(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import files

    return files.du(session, depth=arguments.depth)


def _leave(arguments: Arguments) -> int:
    if arguments.place is not None:
        if arguments.store is not None:
            raise InvalidInput(arguments.place, "and --store are two; name one")
        arguments.store = _store_at(arguments.place)
    return _with_session(_leave_node)(arguments)


def _leave_node(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import leave

    return leave.leave(session)


def _store_at(place: str) -> "Path":
    """The store that a person named by its directory, or by where it is mounted; a mount is not
    asked, for it may hang."""
    from pathlib import Path

    from kvfs.home import is_store
    from kvfs.shell.locate import store_mounted_at

    named = os.path.abspath(place)
    shown = store_mounted_at(place, _find_mounts)
    if shown is not None:
        return shown
    if is_store(Path(named)):
        return Path(named)
    raise InvalidInput(named, "is neither a kvfs store nor where one is mounted")


def _verify(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import files

    return files.verify(session)


def _change(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import files

    return files.change(session, arguments.command)


def _warm(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import warm

    return warm.warm(session)


def _gc(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import upkeep

    return upkeep.gc(session)


def _rebuild(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import upkeep

    return upkeep.rebuild(session)


def _prefixes(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import tree

    return tree.prefixes(
        session,
        arguments.model,
        depth=arguments.depth,
        limit=arguments.limit,
        tokenizer=arguments.tokenizer,
        with_empty=arguments.all,
    )


def _explain(session: "Session", arguments: Arguments) -> int:
    from kvfs.shell import hits

    return hits.explain(
        session,
        arguments.model,
        text=arguments.text,
        tokens_file=arguments.tokens,
        tokenizer=arguments.tokenizer,
    )


# Commands that run something ----------------------------------------------------------------------
def _mount(arguments: Arguments) -> int:
    from kvfs.shell import operate
    from kvfs.shell.mount8 import parse_options

    options = parse_options(",".join(arguments.options))
    config = operate.configure(
        arguments.config or options.config,
        [*arguments.stores, *options.stores],
        arguments.max_bytes or options.max_bytes,
        None,
        arguments.join or options.join,
    )
    return operate.mount(
        operate.with_mount_options(config, options),
        arguments.mountpoint,
        foreground=arguments.foreground,
        tokenizer=arguments.tokenizer or options.tokenizer,
    )


def _umount(arguments: Arguments) -> int:
    from kvfs.shell import operate

    return operate.umount(arguments.mountpoint, lazy=arguments.lazy)


def _serve(arguments: Arguments) -> int:
    from kvfs.shell import operate

    return operate.serve(
        operate.configure(
            arguments.config,
            arguments.stores,
            arguments.max_bytes,
            arguments.idle_exit,
            arguments.join,
        )
    )


def _init(arguments: Arguments) -> int:
    from kvfs.home import default_store
    from kvfs.shell import operate

    return operate.init(arguments.directory or default_store(), sys.stdout)


def _doctor(arguments: Arguments) -> int:
    from kvfs.shell import operate

    return operate.doctor(arguments.store, _find_mounts, sys.stdout, is_json=arguments.json)


def _config(arguments: Arguments) -> int:
    from kvfs.shell import operate

    if arguments.engine == "vllm":
        return operate.print_vllm_config(arguments.store, arguments.model, _find_mounts, sys.stdout)
    return operate.print_lmcache_config(
        arguments.store,
        arguments.mountpoint,
        arguments.model,
        port=arguments.port,
        adapter=arguments.adapter,
        find_mounts=_find_mounts,
        out=sys.stdout,
    )


def _replay(arguments: Arguments) -> int:
    from kvfs.shell import replay
    from kvfs.shell.progress import choose_progress

    wishes = replay.Wishes(
        trace=arguments.trace,
        simulated=arguments.simulate,
        config=arguments.config,
        capacities=arguments.capacity,
        block_bytes=arguments.block_bytes,
        speed=arguments.speed,
        limit=arguments.limit,
        is_prepared=arguments.prepare,
        is_removed=arguments.remove,
    )
    return replay.replay(wishes, sys.stdout, choose_progress(), is_json=arguments.json)


COMMANDS: dict[str, Run] = {
    "mount": _mount,
    "umount": _umount,
    "serve": _serve,
    "leave": _leave,
    "init": _init,
    "doctor": _doctor,
    "config": _config,
    "replay": _replay,
    "status": _with_session(_status),
    "top": _with_session(_top),
    "ls": _with_session(_ls),
    "show": _with_session(_show),
    "du": _with_session(_du),
    "prefixes": _with_session(_prefixes),
    "explain": _with_session(_explain),
    "pin": _with_session(_change),
    "unpin": _with_session(_change),
    "evict": _with_session(_change),
    "warm": _with_session(_warm),
    "verify": _with_session(_verify),
    "gc": _with_session(_gc),
    "rebuild": _with_session(_rebuild),
}

if __name__ == "__main__":
    sys.exit(main())
