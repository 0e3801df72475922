"""`kvfs gc` and `kvfs rebuild`."""

import os
import sys

from kvfs.names import escape
from kvfs.shell.render import count_text, facts, names_text, size_text, write_json
from kvfs.shell.session import Session


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
        count = removed["left_count"]
        shown = names_text([escape(os.fsencode(path)) for path in removed["left"]], count)
        sys.stderr.write(
            f"kvfs gc: {count_text(count, 'foreign name')} left: in blobs, a directory with"
            " content, or newer than the node; look at them, and remove them by hand:"
            f" {shown}\n"
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
