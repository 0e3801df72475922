"""What a node says of itself: the document behind `kvfs status` and `.kvfs/status.json`."""

import os
from dataclasses import asdict
from typing import Any

from kvfs import __version__
from kvfs.node import Node


def status_of(node: Node) -> dict[str, Any]:
    """Plain types only, ready for JSON. Bytes are integers, times nanoseconds since the epoch."""
    usage = node.meta.usage()
    return {
        "version": __version__,
        "store_id": node.store_id,
        "store": os.fspath(node.config.home),
        "pid": os.getpid(),
        "mountpoint": node.mountpoint,
        "idle_exit_s": node.config.idle_exit_s,
        "mount": None if node.describe_mount is None else node.describe_mount(),
        "started_ns": node.started_ns,
        "now_ns": node.now_ns(),
        "clients": len(node.clients),
        "files": usage.inodes,
        "blobs": usage.blobs,
        "size_bytes": usage.size_bytes,
        "used_bytes": sum(node.space.used_bytes(i) for i in range(len(node.directories))),
        "directories": [_directory_status(node, index) for index in range(len(node.directories))],
        "missing": list(node.absent),
        "notices": list(node.notices),
        "cluster": None if node.neighbours is None else node.neighbours.describe(),
        "tiering": None if node.tiering is None else node.tiering.describe(),
        "prefetch": None if node.ahead is None else node.ahead.describe(),
        "counters": asdict(node.counters),
    }


def _directory_status(node: Node, index: int) -> dict[str, Any]:
    directory = node.directories[index]
    if directory is None:
        return {"index": index, "present": False}
    allocated = node.meta.usage().allocated_bytes
    return {
        "index": index,
        "present": True,
        "path": os.fspath(directory.path),
        "store_id": directory.store_id,
        "used_bytes": node.space.used_bytes(index),
        "blob_bytes": allocated[index] if index < len(allocated) else 0,
        "staging_bytes": node.space.staging_bytes(index),
        "trash_bytes": node.space.trash_bytes(index),
        "quarantine_bytes": directory.quarantined_bytes,
        "meta_bytes": node.space.meta_bytes() if index == 0 else 0,
        "max_bytes": directory.limit_bytes(),
        "min_free_bytes": directory.min_free_bytes(),
        "room_bytes": max(0, node.space.room_bytes(index)),
        "disk_free_bytes": directory.free_bytes(),
        "refused_bytes": node.reclaim.refused_bytes(index),
    }
