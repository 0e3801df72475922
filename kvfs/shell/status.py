"""`kvfs status`: what a node says of itself, for people."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from kvfs.names import escape
from kvfs.shell.fullness import full_directory
from kvfs.shell.namespaces import estimate_chunks, find_namespaces, shown_name
from kvfs.shell.render import age_text, count_text, facts, size_text, table, write_json
from kvfs.shell.session import Session
from kvfs.shell.tiers import ahead_lines, tier_lines


def status(session: Session) -> int:
    """`kvfs status`."""
    found = session.client.status()
    spaces = [
        (space, estimate_chunks(session.client, space)) for space in find_namespaces(session.client)
    ]
    models = [
        {
            "name": shown_name(space),
            "model": space.model,
            "fingerprint": space.fingerprint,
            "chunks": census.files,
            "size_bytes": census.size_bytes,
            "is_estimate": census.is_estimate,
        }
        for space, census in spaces
    ]
    if session.is_json:
        write_json(session.out, {**found, "models": models})
        return 0
    session.lines(_status_lines(session, found, models))
    return 0


def _mounted_at(session: Session, mountpoint: str | None) -> str:
    """Where the node shows the store; a place that only the kernel knows is of one that died."""
    if mountpoint is not None:
        return mountpoint
    dead = session.place.mountpoint
    return f"not mounted ({dead} is dead: mount it again)" if dead else "not mounted"


def _mount(mount: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Who serves reads of the mount, and why not the kernel; what cannot be stored yet."""
    if mount is None:
        return
    why_not = mount["why_not_passthrough"]
    if mount.get("reads") == "symlink":
        yield "reads", "by symbolic links to the blobs"
    else:
        yield "reads", f"from Python: {why_not}" if why_not else "kernel passthrough"
    if why := mount.get("unsettled_why"):
        waiting = count_text(mount["unsettled_files"], "closed file")
        size = size_text(mount["unsettled_bytes"])
        yield "warning", f"{waiting} ({size}) not stored yet, bytes only in the mount: {why}"


def _cluster(cluster: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """The cluster that the node is one of, and who else is there."""
    if cluster is None:
        return
    others = [node for node in cluster["nodes"] if not node["is_this"]]
    is_leaving = any(node["is_this"] and node.get("is_leaving") for node in cluster["nodes"])
    state = ", cut off from it" if cluster["is_cut_off"] else ", leaving it" if is_leaving else ""
    yield "cluster", f"{cluster['name']}, {count_text(len(others), 'other node')}{state}"
    yield "names", cluster["metadata"]
    if trouble := cluster.get("trouble"):
        yield "trouble", trouble
    if eviction := cluster.get("eviction"):
        yield "warning", eviction
    if unreadable := cluster.get("unreadable"):
        records = count_text(unreadable, "time")
        yield "warning", f"records of the metadata server were not kvfs's: {records}"
    if fetching := cluster.get("fetching"):
        yield "fetching", count_text(fetching, "file")
    for node in others:
        leaving = ", leaving" if node.get("is_leaving") else ""
        yield "other node", f"{node['host']}:{node['store']} at {node['address']}{leaving}"


def _status_lines(
    session: Session,
    found: dict[str, Any],
    models: Sequence[dict[str, Any]],
) -> Iterator[str]:
    counters = found["counters"]
    hits, lookups = counters["lookup_hits"], counters["lookups"]
    rate = f" ({100 * hits / lookups:.0f}%)" if lookups else ""
    yield from facts(
        [
            ("store", f"{found['store']} (id {found['store_id']})"),
            ("node", f"pid {found['pid']}, version {found['version']}"),
            ("up", age_text(found["now_ns"] - found["started_ns"])),
            ("mounted at", _mounted_at(session, found["mountpoint"])),
            *_mount(found["mount"]),
            *_cluster(found.get("cluster")),
            ("clients", str(found["clients"])),
            ("inodes", f"{found['files']:,}"),
            ("blobs", f"{found['blobs']:,} of {size_text(found['size_bytes'])}"),
            ("look-ups", f"{lookups:,}, {hits:,} hits{rate}"),
            ("opens", f"{counters['opens']:,}, {counters['open_misses']:,} misses"),
            ("stored", _amount(counters, "published")),
            ("evicted", _amount(counters, "evicted")),
            ("corrupt", _damage(counters)),
        ]
    )
    rows = [["directory", "used", "limit", "room", "disk free"]]
    for item in found["directories"]:
        if not item["present"]:
            rows.append([f"number {item['index']} is missing", "-", "-", "-", "-"])
            continue
        limit = item["max_bytes"]
        rows.append(
            [
                escape(os.fsencode(item["path"])),
                size_text(item["used_bytes"]),
                "none" if limit is None else size_text(limit),
                size_text(item["room_bytes"]),
                size_text(item["disk_free_bytes"]),
            ]
        )
    yield ""
    yield from table(rows, right=(1, 2, 3, 4))
    for item in found["directories"]:
        if item["present"] and (why := full_directory(item)) is not None:
            yield f"{escape(os.fsencode(item['path']))} {why.found}: {why.advice}"
    if tiering := found.get("tiering"):
        yield ""
        yield from tier_lines(tiering)
    if prefetch := found.get("prefetch"):
        yield from ahead_lines(prefetch)
    yield from found.get("missing", ())  # a node of an earlier version does not say
    yield from found.get("notices", ())
    if models:
        yield ""
        yield from table(
            [["model", "chunks", "size"]]
            + [
                [
                    item["name"],
                    ("about " if item["is_estimate"] else "") + f"{item['chunks']:,}",
                    size_text(item["size_bytes"]),
                ]
                for item in models
            ],
            right=(1, 2),
        )


def _damage(counters: dict[str, int]) -> str:
    unreadable = counters["unreadable_blobs"]
    refused = f", {unreadable:,} not readable" if unreadable else ""
    return f"{counters['corrupt_blobs']:,} blobs, {counters['missing_blobs']:,} lost{refused}"


def _amount(counters: dict[str, int], name: str) -> str:
    files = count_text(counters[f"{name}_files"], "file")
    return f"{files}, {size_text(counters[f'{name}_bytes'])}"
