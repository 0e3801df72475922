"""The commands that look at files, or change what becomes of them: ls, du, verify, pin, evict."""

import itertools
import sys
from collections.abc import Iterator, Sequence

from kvfs.inspect import Found, disk_usage, files_below, find, list_directory, walk
from kvfs.names import escape
from kvfs.shell.render import count_text, mode_text, short_time_text, size_text, table, write_json
from kvfs.shell.session import Session, inode_document
from kvfs.verify import Checked, Verdict, verify_files

BATCH_FILES = 1000


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
