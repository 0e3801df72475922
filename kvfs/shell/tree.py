"""The command about all cached prompts: `kvfs prefixes`."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from kvfs.client import Client
from kvfs.names import chunk_path, escape, namespace_path
from kvfs.shell.namespaces import (
    Census,
    Namespace,
    choose_namespaces,
    estimate_chunks,
    find_namespaces,
    list_chunks,
    shown_name,
)
from kvfs.shell.positions import Position
from kvfs.shell.prefixes import Run, TreeWalk
from kvfs.shell.render import (
    count_text,
    size_text,
    snippet,
    time_text,
    write_json,
)
from kvfs.shell.session import Session
from kvfs.shell.show import look_at_header
from kvfs.tokenizer import Tokenizer

SNIPPET_TOKENS = 64  # of a chunk, decoded to show its text
SNIPPET_CHARACTERS = 60
_LOOKED_AT_MAX = 64  # files, for one that is in the tree

TextOf = Callable[[Namespace, Position], str | None]


def prefixes(
    session: Session,
    model: str | None,
    *,
    depth: int | None,
    limit: int,
    tokenizer: Path | None,
    with_empty: bool,
) -> int:
    """`kvfs prefixes`: exit code 1 when MODEL has no chunks here. `with_empty`: show also what had
    chunks once, of which only directories are left."""
    known = find_namespaces(session.client)
    spaces = known if model is None else choose_namespaces(known, model)
    counted = [(space, estimate_chunks(session.client, space)) for space in spaces]
    shown = [(space, census) for space, census in counted if census.files or with_empty]
    if model is not None and not shown:
        others = [space for space in known if space not in spaces]
        return complain_of_model("prefixes", model, others)
    text_of = _text_reader(session.client, tokenizer)
    if session.is_json:
        documents = (
            _space_document(session, space, census, depth, limit, text_of)
            for space, census in shown
        )
        write_json(session.out, {}, ("models", documents))
        return 0
    if not shown:
        session.out.write("no chunks are cached\n")
    for number, (space, census) in enumerate(shown):
        if number:
            session.out.write("\n")
        session.lines(_space_lines(session, space, census, depth, limit, text_of))
    return 0


def complain_of_model(command: str, word: str, known: Sequence[Namespace]) -> int:
    """Say that there are no chunks of a model; exit code 1."""
    models = ", ".join(sorted({escape(space.model.encode()) for space in known})) or "none"
    sys.stderr.write(f"kvfs {command}: {word}: no chunks of such a model; cached are: {models}\n")
    return 1


def _text_reader(client: Client, directory: Path | None) -> TextOf:
    """What reads the text of a position: nothing without a tokenizer, or without stored ids."""
    if directory is None:
        return lambda space, position: None
    tokenizer = Tokenizer.load(directory)

    def text_of(space: Namespace, position: Position) -> str | None:
        for entry in position.entries:
            path = chunk_path(space.path, os.fsdecode(entry.info.key))
            header = look_at_header(client, path)
            if header is not None and header.token_ids is not None:
                text = tokenizer.decode(header.token_ids[:SNIPPET_TOKENS])
                return snippet(text, SNIPPET_CHARACTERS)
        return None

    return text_of


def find_other_home(client: Client, space: Namespace) -> str | None:
    """Where the chunks of a directory that was renamed belong: `kv/<model>@<fingerprint>`, by the
    first that is in the tree of prefixes. Engines take all of them for misses here. None when they
    are at home."""
    for path, _, _ in itertools.islice(list_chunks(client, space), _LOOKED_AT_MAX):
        header = look_at_header(client, path) if client.chunk(path) is not None else None
        if header is not None:
            home = namespace_path(header.model, header.fingerprint)
            return None if home == space.path else escape(home)
    return None


class _Tree:
    """The runs of one namespace that are shown, and whether that is all."""

    def __init__(self, client: Client, space: Namespace, census: Census) -> None:
        self._walk = TreeWalk(client, space, census.parts)
        self._census = census
        self.is_cut = False
        self.shown_runs = 0
        self.seen_files = 0

    def runs(self, depth: int | None, limit: int) -> Iterator[Run]:
        """At most `limit` runs (0: all), those that are cut off at last."""
        for run in itertools.chain(self._walk.runs(depth), self._orphans(depth)):
            if limit and self.shown_runs == limit:
                self.is_cut = True
                return
            self.shown_runs += 1
            self.seen_files += run.files + run.below_files
            yield run

    def _orphans(self, depth: int | None) -> Iterator[Run]:
        if self._census.is_estimate or self.seen_files < self._census.files:
            yield from self._walk.orphans(depth)

    @property
    def unplaced_files(self) -> int:
        """Chunk files that fit nowhere: their headers contradict their names or each other."""
        return 0 if self.is_cut else max(0, self._walk.listed_files - self.seen_files)


def _space_lines(
    session: Session,
    space: Namespace,
    census: Census,
    depth: int | None,
    limit: int,
    text_of: TextOf,
) -> Iterator[str]:
    files = count_text(census.files, "chunk file")
    about = "about " if census.is_estimate else ""
    yield f"{shown_name(space)}  {about}{files}, {size_text(census.size_bytes)}"
    home = find_other_home(session.client, space)
    if home is not None:
        yield f"of no use here: they were stored for {home}, where engines look for them"
        return
    tree = _Tree(session.client, space, census)
    follow, middle, last = _branches(session.out)
    is_in_orphans = False
    open_levels: list[bool] = []  # for each level above: whether siblings follow
    for run in tree.runs(depth, limit):
        if run.is_orphan and not is_in_orphans:
            yield "cut off: the chunks before these are gone, so no prompt can use them"
            is_in_orphans = True
        del open_levels[run.level :]
        indent = "".join(follow if follows else "   " for follows in open_levels)
        branch = last if run.is_last else middle
        yield indent + branch + _run_text(session, run, text_of(space, run.head))
        open_levels.append(not run.is_last)
    if tree.is_cut:
        yield f"more than {count_text(tree.shown_runs, 'line')}: --limit 0 shows all"
    if tree.unplaced_files:
        unplaced = count_text(tree.unplaced_files, "file")
        yield f"{unplaced} in no tree: written just now, or no chunks"


def _branches(out: IO[str]) -> tuple[str, str, str]:
    """What a tree is drawn with, as far as the output can show it."""
    drawn = ("│  ", "├─ ", "└─ ")
    try:
        "".join(drawn).encode(getattr(out, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return "|  ", "|- ", "`- "
    return drawn


def _run_text(session: Session, run: Run, text: str | None) -> str:
    words = [
        f"{run.head.token_start}-{run.tail.token_end}",
        count_text(run.positions, "chunk"),
        size_text(run.size_bytes),
        f"stored {session.ago(run.created_ns)}",
        f"used {session.ago(run.used_ns)}",
    ]
    if run.incomplete:
        words.append(f"{run.incomplete} incomplete")
    if run.pinned:
        words.append("pinned" if run.pinned == run.positions else f"{run.pinned} pinned")
    if run.below_positions:
        below = count_text(run.below_positions, "chunk")
        words.append(f"+ {below} in {run.branches} branches, {size_text(run.below_bytes)}")
    if text is not None:
        words.append(f'"{text}"')
    return "  ".join(words)


def _space_document(
    session: Session,
    space: Namespace,
    census: Census,
    depth: int | None,
    limit: int,
    text_of: TextOf,
) -> dict[str, Any]:
    tree = _Tree(session.client, space, census)
    home = find_other_home(session.client, space)
    found = tree.runs(depth, limit) if home is None else ()
    runs = [_run_document(run, text_of(space, run.head)) for run in found]
    return {
        "name": shown_name(space),
        "model": space.model,
        "fingerprint": space.fingerprint,
        "chunk_files": census.files,
        "size_bytes": census.size_bytes,
        "is_estimate": census.is_estimate,
        "groups_and_shards": sorted(census.parts),
        "is_cut": tree.is_cut,
        "unplaced_files": tree.unplaced_files if home is None else census.files,
        "stored_for": home,
        "runs": runs,
    }


def _run_document(run: Run, text: str | None) -> dict[str, Any]:
    return {
        "number": run.number,
        "parent": run.parent or None,
        "level": run.level,
        "is_orphan": run.is_orphan,
        "token_start": run.head.token_start,
        "token_end": run.tail.token_end,
        "chunks": run.positions,
        "files": run.files,
        "incomplete_chunks": run.incomplete,
        "pinned_chunks": run.pinned,
        "size_bytes": run.size_bytes,
        "stored": time_text(run.created_ns),
        "last_used": time_text(run.used_ns),
        "branches": run.branches,
        "below_chunks": run.below_positions,
        "below_bytes": run.below_bytes,
        "first_key": escape(run.head.entries[0].info.key),
        "last_key": escape(run.tail.entries[0].info.key),
        "text": text,
    }
