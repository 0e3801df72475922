"""The commands about prompts: `kvfs prefixes` and `kvfs explain`."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from kvfs.chunk import digest_tokens
from kvfs.client import Client
from kvfs.errors import InvalidInput
from kvfs.names import chunk_path, escape
from kvfs.shell.cost import measure_load_s
from kvfs.shell.explain import (
    TOKENS_MAX,
    End,
    Explanation,
    best_first,
    explain_prompt,
    read_tokens,
)
from kvfs.shell.namespaces import (
    Census,
    Namespace,
    choose_namespaces,
    estimate_chunks,
    find_namespaces,
    shown_name,
)
from kvfs.shell.positions import Position
from kvfs.shell.prefixes import Run, TreeWalk
from kvfs.shell.render import (
    count_text,
    duration_text,
    size_text,
    snippet,
    table,
    time_text,
    write_json,
)
from kvfs.shell.show import look_at_header
from kvfs.shell.views import Session
from kvfs.tokenizer import Tokenizer

SNIPPET_TOKENS = 64  # of a chunk, decoded to show its text
SNIPPET_CHARACTERS = 60
TOKENS_FILE_BYTES_MAX = 16 * TOKENS_MAX

TextOf = Callable[[Namespace, Position], str | None]


# Prefixes -----------------------------------------------------------------------------------------
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
        return _complain_of_model("prefixes", model, others)
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


def _complain_of_model(command: str, word: str, known: Sequence[Namespace]) -> int:
    models = ", ".join(sorted({space.model for space in known})) or "none"
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
    runs = [_run_document(run, text_of(space, run.head)) for run in tree.runs(depth, limit)]
    return {
        "name": shown_name(space),
        "model": space.model,
        "fingerprint": space.fingerprint,
        "chunk_files": census.files,
        "size_bytes": census.size_bytes,
        "is_estimate": census.is_estimate,
        "groups_and_shards": sorted(census.parts),
        "is_cut": tree.is_cut,
        "unplaced_files": tree.unplaced_files,
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


# Explain ------------------------------------------------------------------------------------------
def explain(
    session: Session,
    model: str,
    *,
    text: str | None,
    tokens_file: str | None,
    tokenizer: Path | None,
) -> int:
    """`kvfs explain`: exit code 1 when the model has no chunks here; a miss is no problem."""
    if text is not None:
        if tokenizer is None:
            raise InvalidInput("--text", "needs --tokenizer DIR to become token ids")
        tokens = Tokenizer.load(tokenizer).encode(text)
        if not tokens:
            raise InvalidInput("--text", "has no tokens")
    else:
        assert tokens_file is not None
        tokens = read_tokens(_read_text(tokens_file), tokens_file)
    known = find_namespaces(session.client)
    spaces = choose_namespaces(known, model)
    if not spaces:
        return _complain_of_model("explain", model, known)
    with session.progress("searching"):
        found = best_first(
            [explain_prompt(session.client, space, tokens, digest_tokens) for space in spaces]
        )
    places = _Places(session.client, found)
    if session.is_json:
        documents = [_explanation_document(session, item, places) for item in found]
        write_json(session.out, {"tokens": len(tokens)}, ("models", documents))
    else:
        for number, item in enumerate(found):
            if number:
                session.out.write("\n")
            session.lines(_explanation_lines(session, item, places))
    return 0


def _read_text(file: str) -> str:
    try:
        if file == "-":
            text = sys.stdin.read(TOKENS_FILE_BYTES_MAX + 1)
        else:
            with open(file, encoding="utf-8") as stream:
                text = stream.read(TOKENS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidInput(file, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(file, "is no text; write token ids as JSON or numbers") from error
    if len(text) > TOKENS_FILE_BYTES_MAX:
        raise InvalidInput(file, f"is longer than {TOKENS_FILE_BYTES_MAX} characters")
    return text


class _Places:
    """In which of the store's directories chunks lie."""

    def __init__(self, client: Client, explanations: Sequence[Explanation]) -> None:
        self._paths = {
            item["index"]: item.get("path", f"directory {item['index']}, missing")
            for item in client.status()["directories"]
        }
        digests = {
            entry.inode.digest
            for explanation in explanations
            for position in [*explanation.cached, *explanation.beyond]
            for entry in position.entries
        }
        blobs = client.blobs(list(digests))
        self._directory = {blob.digest: blob.directory for blob in blobs if blob is not None}

    def of(self, position: Position) -> list[str]:
        """Paths of directories, in order."""
        indexes = {self._directory.get(entry.inode.digest) for entry in position.entries}
        known = sorted(index for index in indexes if index is not None)
        return [escape(os.fsencode(self._paths.get(index, f"number {index}"))) for index in known]


def _explanation_lines(session: Session, found: Explanation, places: _Places) -> Iterator[str]:
    load_bytes, load_s = _load_cost(session.client, found)
    cost = "" if load_s is None else f", about {duration_text(load_s)} with one thread"
    yield (
        f"{shown_name(found.namespace)}: {found.hit_tokens:,} of {found.tokens:,} tokens cached,"
        f" {size_text(load_bytes)} to load{cost}"
    )
    rows = []
    for position in found.cached:
        is_hit = position.token_end <= found.hit_tokens
        rows.append(_chunk_row(session, position, "hit" if is_hit else "unusable", places))
    if found.end is not End.COMPLETE and found.hit_tokens == _cached_end(found):
        end = min(found.hit_tokens + found.chunk_tokens, found.tokens)
        rows.append([f"{found.hit_tokens}-{end}", "miss", "", "", "", ""])
    rows += [_chunk_row(session, position, "unusable", places) for position in found.beyond]
    yield from ("  " + line for line in table(rows, right=(2,)))
    yield "  " + end_text(found)


def _load_cost(client: Client, found: Explanation) -> tuple[int, float | None]:
    """Bytes of the hit, and seconds to read them."""
    entries = [
        entry
        for position in found.cached
        if position.token_end <= found.hit_tokens
        for entry in position.entries
    ]
    size_bytes = sum(entry.inode.size_bytes for entry in entries)
    paths = [chunk_path(found.namespace.path, os.fsdecode(entry.info.key)) for entry in entries]
    return size_bytes, measure_load_s(client, paths, size_bytes)


def _chunk_row(session: Session, position: Position, word: str, places: _Places) -> list[str]:
    return [
        f"{position.token_start}-{position.token_end}",
        word,
        size_text(position.size_bytes),
        f"stored {session.ago(position.created_ns)}",
        f"used {session.ago(position.used_ns)}",
        ", ".join(places.of(position)),
    ]


def _cached_end(found: Explanation) -> int:
    return found.cached[-1].token_end if found.cached else 0


def end_text(found: Explanation) -> str:
    """Why the hit ends where it does, as a sentence for a person."""
    rest = found.tokens - _cached_end(found)
    match found.end:
        case End.COMPLETE if rest:
            return f"all full chunks are cached; the last {count_text(rest, 'token')} fill none"
        case End.COMPLETE:
            return "all of it is cached"
        case End.TOKENS_UNKNOWN:
            return (
                f"at token {_cached_end(found)} chunks go on, but they were stored without token"
                " ids, so they can't be compared with this prompt"
            )
        case End.INCOMPLETE:
            missing = ", ".join(f"group {g} shard {s}" for g, s in sorted(found.missing_parts))
            return (
                f"the chunk at token {found.hit_tokens} is incomplete: {missing} not stored or gone"
            )
        case End.GAP:
            behind = count_text(len(found.beyond), "chunk")
            return (
                f"gap: what follows token {found.hit_tokens} was evicted or found corrupt;"
                f" {behind} behind it: of no use until it is stored again"
            )
    searched = "" if found.is_searched else " (too many files to search for chunks behind it)"
    return f"no chunk continues at token {found.hit_tokens}: never stored, or evicted{searched}"


def _explanation_document(session: Session, found: Explanation, places: _Places) -> dict[str, Any]:
    load_bytes, load_s = _load_cost(session.client, found)
    return {
        "name": shown_name(found.namespace),
        "model": found.namespace.model,
        "fingerprint": found.namespace.fingerprint,
        "hit_tokens": found.hit_tokens,
        "chunk_tokens": found.chunk_tokens,
        "load_bytes": load_bytes,
        "load_s": load_s,  # with one thread, from a sample
        "end": found.end.value,
        "reason": end_text(found),
        "missing_groups_and_shards": sorted(found.missing_parts),
        "chunks": [
            _chunk_document(p, p.token_end <= found.hit_tokens, places) for p in found.cached
        ]
        + [_chunk_document(p, False, places) for p in found.beyond],
    }


def _chunk_document(position: Position, is_hit: bool, places: _Places) -> dict[str, Any]:
    return {
        "token_start": position.token_start,
        "token_end": position.token_end,
        "is_hit": is_hit,
        "size_bytes": position.size_bytes,
        "directories": places.of(position),
        "stored": time_text(position.created_ns),
        "last_used": time_text(position.used_ns),
        "keys": sorted(escape(entry.info.key) for entry in position.entries),
    }
