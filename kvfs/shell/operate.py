"""The commands that set kvfs up and run it: mount, umount, serve, init, doctor, config.

Each returns the exit code; what cannot run raises a `KvfsError`.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from kvfs.errors import InvalidInput, KvfsError
from kvfs.home import CONFIG_NAME, STORE_MARK, check_directory, has_lost_mark, is_store, log_of
from kvfs.names import escape
from kvfs.settings.cluster import join_cluster
from kvfs.settings.load import load_config, load_config_of_store
from kvfs.settings.words import Config
from kvfs.shell.locate import FindMounts, locate, store_mounted_at
from kvfs.shell.mount8 import MountOptions

CONFIG_TEMPLATE = """\
# Configuration of this kvfs store, read by `kvfs mount` and `kvfs serve`.
# Every key may be left out. What is commented out shows an example or the default.

# How much of its disk the store may use: bytes, "200GiB", or a share such as "80%".
# Without it the store grows until only min_free is left, and then evicts.
# max_bytes = "200GiB"

# How much stays free on the disk. Default: 5%, at most 1 GiB.
# min_free = "1GiB"

# Wait for the disk at every store. Default: no. A cache may lose its newest files to a power cut.
# fsync = false

# Who may talk to the node's socket: 0o600 is its own user, 0o660 its group too.
# socket_mode = 0o600

# More directories, for example one a disk. This one comes first.
# [[store]]
# path = "{store}"
# max_bytes = "200GiB"
# [[store]]
# path = "/mnt/nvme1/kvfs"
# max_bytes = "1TiB"

[mount]
# Let other users see the mount. Default: only the one who mounts.
# allow_other = false
# Let the kernel serve reads by itself, where it can.
# passthrough = true
# Show published files as symbolic links to their bytes in the store, where it can't. Read
# docs/mount.md first.
# symlink = false
# read_ahead_kib = 1024

# One of many nodes that show one namespace, with their names on a server of Redis's protocol.
# [cluster]
# metadata = "redis://host:6379"
# Or a file with that line in it, for a password that others may not see.
# metadata_file = "/etc/kvfs/metadata"
# Of the cluster, where several share a server.
# name = "kvfs"
# Where to serve other nodes. Default: any port of the address from which the server is reached.
# listen = "10.0.0.7:7400"
# The port there for the bytes of files. Default: the one after that of listen.
# bulk_port = 7401
# Serve nodes without keys. Default: those only whose keys the metadata server lists.
# insecure = false
# Encrypt the bytes of files as well, on all nodes or none. Ten times slower on a fast network.
# encrypt_bulk = false
# A file that engines here have read so often straight from another node becomes a copy; 0: never.
# copy_after = 2
# Files that several nodes are to have: those whose paths begin like this. The longest one counts.
# [[cluster.copies]]
# prefix = "kv/"
# copies = 2

# Places beside the store to which files are copied, and from which they are read: docs/tiers.md.
# [[tiers]]
# name = "scratch"
# memory, nvme or shared, each with a path of its own.
# kind = "shared"
# path = "/scratch/kvfs"
# Above it this node evicts from the tier. Default: none.
# max_bytes = "10TiB"
# [[tiers]]
# name = "bucket"
# s3://bucket/prefix, gs:, az://account/container. Credentials come from the environment.
# kind = "object"
# url = "s3://bucket/prefix"
# Of a server other than the provider's own.
# endpoint = "https://s3.example.org:9000"
# region = "eu-central-1"
# Files that are copied to fewer than all tiers: those whose paths begin like this. The longest
# one counts.
# [[tier_copies]]
# prefix = "kv/"
# A number of tiers, "all" or "never".
# copies = 1
# Only once a file is read after it was stored.
# second_use = false

# What is brought here from tiers and other nodes before it is asked for.
# [prefetch]
# What requests that wait in an engine will read.
# expected = true
# The chunks that continue one that was just read.
# children = true
# The files that used to be read after the one that was just read.
# successors = true
# A share of the store above which nothing comes on a guess, as the last two are.
# full_at = "90%"
"""


def configure(
    file: Path | None,
    stores: Sequence[Path],
    max_bytes: str | None,
    idle_exit_s: float | None,
    join: str | None = None,
) -> Config:
    """The configuration of a node: `--config`, else the `kvfs.toml` of its first store, else
    defaults. A store's own file may name more directories; it must name that store first."""
    if file is not None:
        config = load_config(file, stores, max_bytes=max_bytes)
        check_directory(config.home)
    else:
        config = load_config_of_store(stores, max_bytes=max_bytes)
    if join is not None:
        config = replace(config, cluster=join_cluster(config.cluster, join, "--join"))
    return config if idle_exit_s is None else replace(config, idle_exit_s=idle_exit_s)


def with_mount_options(config: Config, options: MountOptions) -> Config:
    """A configuration with what `-o` asked for beside it."""
    mount = replace(
        config.mount,
        allow_other=config.mount.allow_other or options.allow_other,
        passthrough=config.mount.passthrough and options.passthrough,
        symlink=config.mount.symlink or options.symlink,
        flags=options.flags,
    )
    return replace(config, mount=mount)


def serve(config: Config) -> int:
    """`kvfs serve`. One that leaves when it is idle was started by a client, and logs to the store
    alone."""
    from kvfs.daemon import log_to
    from kvfs.serve import serve_command

    log_to(log_of(config.home), echo=config.idle_exit_s is None)
    return serve_command(config)


def _is_empty(directory: Path) -> bool:
    try:
        return not any(directory.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False


def mount(config: Config, mountpoint: Path, *, foreground: bool, tokenizer: Path | None) -> int:
    """`kvfs mount`."""
    try:
        from mount.run import mount_command
    except ImportError as error:
        raise KvfsError(
            f"the mount needs pyfuse3 and libfuse 3 ({error}); kvfs doctor says more"
        ) from error
    return mount_command(config, mountpoint, foreground, tokenizer)


def umount(mountpoint: Path, *, lazy: bool) -> int:
    """`kvfs umount`."""
    from mount.point import umount_command

    return umount_command(mountpoint, lazy)


def init(directory: Path, out: IO[str]) -> int:
    """`kvfs init`: an empty store with a configuration to edit, or a new mark for a store that lost
    its own. Changes nothing that is there."""
    home = Path(os.path.abspath(directory))
    own = home / CONFIG_NAME
    if has_lost_mark(home):
        _restore(home)
        out.write(f"made {home / STORE_MARK} again; all else is as it was\n")
        return 0
    if own.exists():
        raise InvalidInput(str(home), f"is a store already; edit {own}")
    if not is_store(home) and not _is_empty(home):
        raise InvalidInput(str(home), "is not empty; name a new or empty directory")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(own, "x", encoding="utf-8") as file:
            file.write(CONFIG_TEMPLATE.format(store=home))
    except OSError as error:
        raise InvalidInput(str(home), f"cannot hold a store: {error.strerror}") from error
    out.write(f"made {own}\nnext: kvfs mount MOUNTPOINT --store {home}\n")
    return 0


def _restore(directory: Path) -> None:
    from kvfs.roster import home_of, restore_mark
    from kvfs.shell.doctor.node import check_node

    check_directory(directory)
    home = home_of(directory)
    check_directory(home)
    if check_node(home)[0]:  # its lock went with the mark: a second node could not be kept out
        raise InvalidInput(
            str(directory), f"is still served by a node of {home}; stop that first, then try again"
        )
    restore_mark(directory)


def _shown(path: Path) -> str:
    return escape(os.fsencode(path))


def print_vllm_config(
    store: Path | None, model: str | None, find_mounts: FindMounts, out: IO[str]
) -> int:
    """`kvfs config vllm`."""
    from kvfs.shell.configs import MODEL_PLACEHOLDER, vllm_config

    out.write(vllm_config(locate(store, (), find_mounts).store, model or MODEL_PLACEHOLDER))
    return 0


def print_lmcache_config(
    store: Path | None,
    mountpoint: Path | None,
    model: str | None,
    *,
    port: int | None,
    adapter: str,
    find_mounts: FindMounts,
    out: IO[str],
) -> int:
    """`kvfs config lmcache`."""
    from kvfs.shell.configs import LMCACHE_PORT, MODEL_PLACEHOLDER, lmcache_config

    if mountpoint is None:
        mountpoint = locate(store, (), find_mounts).mountpoint
    if mountpoint is None:
        raise InvalidInput("lmcache", "no mount is running; mount one, or name --mountpoint DIR")
    out.write(
        lmcache_config(
            Path(os.path.abspath(mountpoint)),
            model or MODEL_PLACEHOLDER,
            port=LMCACHE_PORT if port is None else port,
            adapter="fs" if adapter == "fs" else "fs_native",
        )
    )
    return 0


def doctor(store: Path | None, find_mounts: FindMounts, out: IO[str], *, is_json: bool) -> int:
    """`kvfs doctor`, of one store (which may be named by where it is mounted) or of all that are
    mounted: exit code 1 when something does not work."""
    from kvfs.shell.doctor.examine import examine, stores_to_examine
    from kvfs.shell.doctor.finding import Level
    from kvfs.shell.render import write_json

    has_failed = False
    documents = []
    if store is None:
        stores = stores_to_examine(find_mounts)
    else:  # a mount is not asked: its process may have died
        shown = store_mounted_at(str(store), find_mounts)
        stores = [shown or Path(os.path.abspath(store))]
    for finding in examine(stores, find_mounts):
        has_failed |= finding.level is Level.FAIL
        if is_json:
            documents.append(
                {
                    "check": finding.check,
                    "level": finding.level.value,
                    "found": finding.found,
                    "advice": finding.advice or None,
                    "store": None if finding.store is None else _shown(finding.store),
                }
            )
            continue
        out.write(f"{finding.level.value:<4}  {finding.check:<18}  {finding.found}\n")
        if finding.advice:
            out.write(f"      {'':<18}  -> {finding.advice}\n")
        out.flush()
    if is_json:
        write_json(out, {"ok": not has_failed}, ("findings", documents))
    elif has_failed:
        sys.stderr.write(
            "kvfs doctor: something does not work; see the lines that begin with fail\n"
        )
    return 1 if has_failed else 0
