"""`kvfs leave`: have a node's last copies move to other nodes before it goes."""

import sys
import time
from typing import Any

from kvfs.errors import Unavailable
from kvfs.shell.progress import Progress
from kvfs.shell.render import count_text, size_text, write_json
from kvfs.shell.session import Session

_ASK_S = 0.25
_PROBLEM_DEADLINE_S = 60.0  # without the metadata server nothing can move


def leave(session: Session) -> int:
    """Return when nothing is only on this node: 0, or 1 when some files found no room elsewhere.
    Raises `Unavailable` where the cluster cannot be asked; the node goes on in any case."""
    with session.progress("moving last copies") as progress:
        found = _wait_done(session, progress)
    if session.is_json:
        names = ("moved_files", "moved_bytes", "left_files", "left_bytes")
        write_json(session.out, {name: found[name] for name in names}, ("left", found["left"]))
    else:
        moved = f"{count_text(found['moved_files'], 'file')}, {size_text(found['moved_bytes'])}"
        rest = "" if found["left_files"] else "; nothing is only here, so the node may be stopped"
        session.out.write(f"{moved} moved to other nodes{rest}\n")
        for item in found["left"]:
            size = size_text(item["size_bytes"])
            session.out.write(f"left  {item['path']}  {size}: {item['reason']}\n")
    if found["left_files"]:
        left = f"{count_text(found['left_files'], 'file')}, {size_text(found['left_bytes'])}"
        sys.stderr.write(
            f"kvfs leave: {left} only here still; make room on other nodes, and run it again\n"
        )
    return 1 if found["left_files"] else 0


def _wait_done(session: Session, progress: Progress) -> dict[str, Any]:
    client = session.client
    found = client.leave()
    shown_bytes = found["moved_bytes"]
    before_bytes = shown_bytes  # by an earlier call
    problem_end_s = time.monotonic() + _PROBLEM_DEADLINE_S
    while not found["is_done"]:
        time.sleep(_ASK_S)
        found = client.leave(begin=False)
        progress.set_total(found["moved_bytes"] + found["to_move_bytes"] - before_bytes)
        progress.advance(found["moved_bytes"] - shown_bytes)
        shown_bytes = found["moved_bytes"]
        if not found["problem"]:
            problem_end_s = time.monotonic() + _PROBLEM_DEADLINE_S
        elif time.monotonic() > problem_end_s:
            raise Unavailable(
                f"{session.place.store}: {found['problem']}; the node goes on leaving once it can:"
                " run kvfs leave again then"
            )
    return found
