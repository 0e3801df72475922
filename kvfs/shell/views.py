"""The commands that look at files and at the node: status, ls, show, du, verify, pin, evict, gc.

Each takes a connected client and where it is, writes to `out` and returns the exit code: 0, or 1
when it found a problem. What cannot run raises a `KvfsError`.
"""

import itertools
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from kvfs.client import Client
from kvfs.inspect import (
    Found,
    disk_usage,
    files_below,
    find,
    list_directory,
    walk,
)
from kvfs.meta.contract import Inode
from kvfs.names import escape
from kvfs.shell.locate import Place
from kvfs.shell.namespaces import estimate_chunks, find_namespaces, shown_name
from kvfs.shell.progress import ShowProgress, no_progress
from kvfs.shell.render import (
    age_text,
    count_text,
    facts,
    mode_text,
    short_time_text,
    size_text,
    table,
    time_text,
    write_json,
)
from kvfs.shell.tiers import ahead_lines, tier_lines
from kvfs.verify import Checked, Verdict, verify_files

BATCH_FILES = 1000


@dataclass(frozen=True, slots=True)
class Session:
    """What every command gets."""

    client: Client
    place: Place
    out: IO[str]
    is_json: bool
    now_ns: int
    progress: ShowProgress = no_progress

    def lines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.out.write(line + "\n")

    def ago(self, time_ns: int) -> str:
        return f"{age_text(self.now_ns - time_ns)} ago" if time_ns else "never"


_TYPES = {
    stat.S_IFDIR: "directory",
    stat.S_IFREG: "file",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def inode_document(path: bytes, inode: Inode) -> dict[str, Any]:
    """What every JSON document says of a file."""
    return {
        "path": "/" + escape(path),
        "type": _TYPES.get(stat.S_IFMT(inode.mode), "unknown"),
        "inode": inode.ino,
        "mode": f"{stat.S_IMODE(inode.mode):04o}",
        "links": inode.nlink,
        "uid": inode.uid,
        "gid": inode.gid,
        "size_bytes": inode.size_bytes,
        "digest": inode.digest.hex() or None,
        "pinned": inode.pinned,
        "modified": time_text(inode.mtime_ns),
        "last_used": time_text(inode.used_ns),
        "target": escape(inode.target) or None,
    }


# Node ---------------------------------------------------------------------------------------------
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


def _reads(mount: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Who serves reads of the mount, and why not the kernel."""
    if mount is not None:
        if mount.get("reads") == "symlink":
            yield "reads", "by symbolic links to the blobs"
            return
        why_not = mount["why_not_passthrough"]
        yield "reads", f"from Python: {why_not}" if why_not else "kernel passthrough"


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
            *_reads(found["mount"]),
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


def gc(session: Session) -> int:
    """`kvfs gc`."""
    with session.progress("collecting"):
        removed = session.client.gc()
    if session.is_json:
        write_json(session.out, removed)
        return 0
    counts = {name: n for name, n in removed.items() if name not in ("left", "left_count")}
    session.lines(facts([(name.replace("_", " "), _value(name, n)) for name, n in counts.items()]))
    if removed["left_count"]:
        shown = ", ".join(escape(os.fsencode(path)) for path in removed["left"])
        more = " ..." if removed["left_count"] > len(removed["left"]) else ""
        sys.stderr.write(
            f"kvfs gc: {count_text(removed['left_count'], 'foreign name')} left in staging, a"
            " directory with content or newer than the node; look at them, and remove them by"
            f" hand: {shown}{more}\n"
        )
    return 0


def _value(name: str, amount: int) -> str:
    return size_text(amount) if name.endswith("_bytes") else f"{amount:,}"


def rebuild(session: Session) -> int:
    """`kvfs rebuild`."""
    with session.progress("reading chunk headers"):
        count = session.client.rebuild()
    if session.is_json:
        write_json(session.out, {"rebuilt_files": count})
    else:
        session.out.write(f"{count_text(count, 'name')} rebuilt\n")
    return 0


# Files --------------------------------------------------------------------------------------------
def ls(session: Session, *, is_long: bool) -> int:
    """`kvfs ls`."""
    path = session.place.paths[0]
    top = find(session.client, path)
    found: Iterator[Found] = iter([top])
    if top.inode.is_directory:
        prefix = path + b"/" if path else b""
        found = (
            Found(prefix + entry.name, entry.inode)
            for entry in list_directory(session.client, path)
        )
    if session.is_json:
        items = (
            {"name": escape(item.path.rpartition(b"/")[2]), **inode_document(item.path, item.inode)}
            for item in found
        )
        write_json(session.out, {"path": "/" + escape(path)}, ("entries", items))
    elif is_long:
        while page := list(itertools.islice(found, BATCH_FILES)):
            session.lines(table([_long_row(item) for item in page], right=(1, 2, 3, 4)))
    else:
        session.lines(_shown_name(item) for item in found)
    return 0


def _shown_name(item: Found) -> str:
    name = escape(item.path.rpartition(b"/")[2]) or "/"
    return name + "/" if item.inode.is_directory and name != "/" else name


def _long_row(item: Found) -> list[str]:
    inode = item.inode
    name = _shown_name(item)
    if inode.target:
        name += f" -> {escape(inode.target)}"
    return [
        mode_text(inode.mode) + ("p" if inode.pinned else ""),
        str(inode.nlink),
        str(inode.uid),
        str(inode.gid),
        str(inode.size_bytes),
        short_time_text(inode.mtime_ns),
        name,
    ]


def du(session: Session, *, depth: int) -> int:
    """`kvfs du`."""
    sums = disk_usage(session.client, session.place.paths[0], depth)
    with session.progress("counting"):
        found = list(sums)
    if session.is_json:
        items = (
            {
                "path": "/" + escape(item.path),
                "files": item.files,
                "size_bytes": item.size_bytes,
                "unique_bytes": item.unique_bytes,
                "allocated_bytes": item.allocated_bytes,
            }
            for item in found
        )
        write_json(session.out, {}, ("directories", items))
        return 0
    rows = [["files", "size", "unique", "on disk", "path"]]
    for item in found:
        rows.append(
            [
                f"{item.files:,}",
                size_text(item.size_bytes),
                size_text(item.unique_bytes),
                size_text(item.allocated_bytes),
                "/" + escape(item.path),
            ]
        )
    session.lines(table(rows, right=(0, 1, 2, 3)))
    return 0


def verify(session: Session) -> int:
    """`kvfs verify`: exit code 1 when bad bytes were found, or files that cannot be read."""
    path = session.place.paths[0]
    files = read_bytes = 0
    bad: list[Checked] = []
    unreadable: list[Checked] = []
    with session.progress("verifying") as progress:
        if progress.is_shown:
            progress.set_total(
                sum(f.inode.size_bytes for f in walk(session.client, path) if f.inode.digest)
            )
        for checked in verify_files(session.client, path):
            progress.advance(checked.size_bytes)
            if checked.verdict in (Verdict.GOOD, Verdict.CORRUPT):
                files += 1
                read_bytes += checked.read_bytes
            if checked.verdict is Verdict.CORRUPT:
                bad.append(checked)
                if not session.is_json:
                    session.out.write(f"corrupt  /{escape(checked.path)}\n")
            if checked.verdict is Verdict.UNREADABLE:
                unreadable.append(checked)
                if not session.is_json:
                    session.out.write(f"unreadable  /{escape(checked.path)}: {checked.reason}\n")
    if session.is_json:
        items = ({"path": "/" + escape(i.path), "size_bytes": i.size_bytes} for i in bad)
        write_json(
            session.out,
            {
                "files": files,
                "read_bytes": read_bytes,
                "corrupt_files": len(bad),
                "unreadable_files": len(unreadable),
                "unreadable": [
                    {"path": "/" + escape(i.path), "reason": i.reason} for i in unreadable
                ],
            },
            ("corrupt", items),
        )
    else:
        verdict = f"{len(bad):,} corrupt, quarantined" if bad else "all good"
        if unreadable:
            verdict += f"; {len(unreadable):,} more cannot be read, see node.log"
        checked_files = count_text(files, "file")
        session.out.write(f"{checked_files}, {size_text(read_bytes)} read: {verdict}\n")
    return 1 if bad or unreadable else 0


def change(session: Session, verb: str) -> int:
    """`kvfs pin`, `unpin` and `evict`: of a directory all that it holds. Exit code 1 when a pinned
    file was left."""

    def call(paths: Sequence[bytes]) -> tuple[int, int]:
        if verb == "evict":
            return session.client.evict_copies(paths)
        return (session.client.pin if verb == "pin" else session.client.unpin)(paths), 0

    for path in session.place.paths:  # before anything changes
        find(session.client, path)
    done = asked = copies = 0  # of those evicted, `copies` are elsewhere too, and stay
    with session.progress(verb):
        files = files_below(session.client, session.place.paths)
        while batch := list(itertools.islice(files, BATCH_FILES)):
            asked += len(batch)
            changed, stay = call(batch)
            done += changed
            copies += stay
    if session.is_json:
        document = {"command": verb, "files": done, "left": asked - done}
        write_json(session.out, document | ({"copies": copies} if verb == "evict" else {}))
    else:
        word = {"pin": "pinned", "unpin": "unpinned", "evict": "evicted"}[verb]
        if copies:
            kept = "the file stays, tiers or other nodes have it"
            kept = kept if copies == 1 else "the files stay, tiers or other nodes have them"
            given = "1 copy" if copies == 1 else f"{copies:,} copies"
            session.out.write(f"{given} given up; {kept}\n")
        if done > copies or not copies:
            session.out.write(f"{count_text(done - copies, 'file')} {word}\n")
    if done < asked and verb == "evict":
        left = count_text(asked - done, "file")
        sys.stderr.write(f"kvfs evict: {left} left, pinned or gone; unpin first with kvfs unpin\n")
    return 1 if done < asked and verb == "evict" else 0
