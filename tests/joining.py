"""Stores that come to a cluster, each a node in the test's own process, and what is in them."""

import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import trio

from kvfs.life import running
from kvfs.meta.contract import ROOT_INO, Changes, Inode
from kvfs.node import Node
from kvfs.settings.words import ClusterConfig, Config, DirectoryConfig
from scripts.redis_rig import RedisServer
from tests.own_node import store

SOON_S = 20.0


def alone(path: Path, *more: Path) -> Config:
    return Config(tuple(map(DirectoryConfig, (path, *more))))


def joined(config: Config, server: RedisServer, name: str = "kvfs") -> Config:
    return replace(config, cluster=ClusterConfig(server.url, name))


@asynccontextmanager
async def searched(config: Config) -> AsyncIterator[Node]:
    """A node that has found all that lies in its store."""
    with trio.fail_after(SOON_S):
        async with running(config) as node:
            async with node.upkeep_lock:
                pass
            yield node


def find(node: Node, path: bytes) -> Inode | None:
    node.refresh()
    return node.meta.resolve([path])[0]


async def load(node: Node, path: bytes) -> bytes | None:
    """Bytes as an open gives them, from wherever they are."""
    inode = find(node, path)
    if inode is None:
        return None
    fd = await node.open_content(inode.ino)
    try:
        return os.pread(fd, 1 << 20, 0)
    finally:
        os.close(fd)


def forget_database(config: Config) -> None:
    """As a start sees it after the machine has crashed."""
    (config.home / "meta" / "running").write_text("another boot")


def fill(node: Node) -> None:
    """Some of everything that can have a name."""
    meta = node.meta
    directory = meta.make(ROOT_INO, b"d", stat.S_IFDIR | 0o2750, 7, 8, 5)
    meta.make(directory.ino, b"empty", stat.S_IFDIR | 0o700, 7, 8, 5)
    meta.make(directory.ino, b"link", stat.S_IFLNK | 0o777, 7, 8, 5, target=b"../f")
    meta.make(directory.ino, b"fifo", stat.S_IFIFO | 0o600, 7, 8, 5)
    meta.make(directory.ino, b"unwritten", stat.S_IFREG | 0o600, 7, 8, 5)
    file = store(node, b"d/f", b"plain")
    meta.set_attributes(file.ino, Changes(mode=0o640, uid=7, gid=8, mtime_ns=1234), 5)
    meta.set_pinned(file.ino, True)
    meta.link(file.ino, ROOT_INO, b"again", 5)
    store(node, b"twin", b"plain")
    store(node, b"taken", b"of before")


def state_of(meta: Path) -> dict[str, bytes]:
    """All that a start may change in a store's metadata, but for LMDB's lock."""
    files = {str(path.relative_to(meta)): path.read_bytes() for path in meta.rglob("*.*")}
    files |= {name: (meta / name).read_bytes() for name in os.listdir(meta) if "." not in name}
    return {name: data for name, data in files.items() if name != "lock.mdb"}
