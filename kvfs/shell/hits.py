"""The command about one prompt: `kvfs explain`."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from kvfs.shell.namespaces import choose_namespaces, find_namespaces, shown_name
from kvfs.shell.positions import Position
from kvfs.shell.render import count_text, duration_text, size_text, table, time_text, write_json
from kvfs.shell.session import Session
from kvfs.shell.tree import complain_of_model, find_other_home
from kvfs.tokenizer import Tokenizer

TOKENS_FILE_BYTES_MAX = 16 * TOKENS_MAX


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
    homes = {space: find_other_home(session.client, space) for space in spaces}
    for space, home in homes.items():
        if home is not None:
            sys.stderr.write(
                f"kvfs explain: {shown_name(space)}: left out, its chunks were stored for {home},"
                " where engines look for them\n"
            )
    if spaces and all(homes.values()):
        return 1
    spaces = [space for space in spaces if homes[space] is None]
    if not spaces:
        return complain_of_model("explain", model, known)
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
