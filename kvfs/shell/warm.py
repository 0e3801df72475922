"""`kvfs warm`: bring files here that only tiers or other nodes have."""

import sys

from kvfs.config import WARM_WINDOW_FILES
from kvfs.errors import InvalidInput
from kvfs.names import escape
from kvfs.shell.render import count_text, size_text, write_json
from kvfs.shell.session import Session
from kvfs.warm import Warmed, measure_away, warm_files


def warm(session: Session) -> int:
    """Exit code 1 when nobody gives some of them. Raises `InvalidInput` for more than the store may
    hold, which would push out what has just come."""
    away_bytes = measure_away(session.client, session.place.paths)
    _refuse_too_much(session, away_bytes)
    try:
        return _warm(session, away_bytes)
    except KeyboardInterrupt:
        sys.stderr.write(
            "kvfs warm: interrupted; what was asked for goes on, at most"
            f" {count_text(WARM_WINDOW_FILES, 'file')}: kvfs status says how many are under way\n"
        )
        raise


def _warm(session: Session, away_bytes: int) -> int:
    here_files = here_bytes = brought_files = brought_bytes = 0
    missing: list[Warmed] = []
    with session.progress("warming") as progress:
        progress.set_total(away_bytes)
        for warmed in warm_files(session.client, session.place.paths):
            if not warmed.is_here:
                missing.append(warmed)
                if not session.is_json:
                    session.out.write(f"missing  /{escape(warmed.path)}\n")
            elif warmed.was_brought:
                brought_files += 1
                brought_bytes += warmed.size_bytes
            else:
                here_files += 1
                here_bytes += warmed.size_bytes
            if warmed.was_away:
                progress.advance(warmed.size_bytes)
    if session.is_json:
        document = {
            "command": "warm",
            "brought_files": brought_files,
            "brought_bytes": brought_bytes,
            "here_files": here_files,
            "here_bytes": here_bytes,
            "missing_files": len(missing),
        }
        items = ({"path": "/" + escape(i.path), "size_bytes": i.size_bytes} for i in missing)
        write_json(session.out, document, ("missing", items))
    else:
        brought = f"{count_text(brought_files, 'file')} brought, {size_text(brought_bytes)}"
        session.out.write(f"{brought}; {here_files:,} here already\n")
    if missing:
        files = count_text(len(missing), "file")
        sys.stderr.write(
            f"kvfs warm: no tier and no other node gives {files}; see kvfs show PATH, kvfs status"
            " and node.log\n"
        )
    return 1 if missing else 0


def _refuse_too_much(session: Session, away_bytes: int) -> None:
    directories = session.client.status()["directories"]
    held_bytes = sum(
        item["used_bytes"] + item["room_bytes"] for item in directories if item["present"]
    )
    if away_bytes > held_bytes:
        shown = ", ".join("/" + escape(path) for path in session.place.paths)
        raise InvalidInput(
            shown,
            f"{size_text(away_bytes)} are not here, and the store holds no more than"
            f" {size_text(held_bytes)}; name less, or raise max_bytes",
        )
