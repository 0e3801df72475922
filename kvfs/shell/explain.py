"""Why a prompt hits as far as it does: chunk by chunk along what is cached, to the first miss.

An engine finds chunks by its own prefix hash, which only it can compute. Here they are found from
the start of the tree instead, by the digest of the token ids that each chunk was stored with.
"""

import enum
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvfs.errors import InvalidInput
from kvfs.shell.namespaces import Namespace, Part, estimate_chunks
from kvfs.shell.positions import ChunkSource, Position, keys_of, read_positions
from kvfs.shell.prefixes import TreeWalk

TOKEN_ID_MAX = 2**32 - 1
TOKENS_MAX = 16 * 1024 * 1024
FORKS_MAX = 64  # chains with equal tokens but other keys (a salt, an adapter) that are followed
GAP_SEARCH_FILES_MAX = 200_000  # a larger namespace is not searched for what lies behind a gap

TokensDigest = Callable[[Sequence[int]], bytes]


class End(enum.Enum):
    """Why the hit ends where it does."""

    COMPLETE = "complete"  # what remains fills no chunk
    NO_CHUNK = "no_such_chunk"
    GAP = "gap"  # later chunks of the prompt are there, this one is not
    INCOMPLETE = "incomplete"  # a KV group or shard of the chunk is missing
    TOKENS_UNKNOWN = "tokens_not_stored"  # chunks go on, but without the ids to compare


@dataclass(frozen=True, slots=True)
class Explanation:
    """One namespace's answer for a prompt."""

    namespace: Namespace
    tokens: int  # of the prompt
    chunk_tokens: int  # of one chunk, 0 when nothing is cached to tell
    cached: tuple[Position, ...]  # in order, up to the first that is not there
    hit_tokens: int  # that an engine can load
    end: End
    missing_parts: frozenset[Part]  # of the first incomplete chunk
    beyond: tuple[Position, ...]  # cached behind the gap, of no use until it is filled
    is_searched: bool  # whether the namespace was searched for what lies behind


def read_tokens(text: str, subject: str) -> list[int]:
    """Token ids from a JSON list, or from numbers between spaces or commas.

    Raises `InvalidInput` naming `subject`.
    """
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else _split_numbers(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(subject, f"holds no token ids: {error}") from error
    if not isinstance(values, list) or len(values) > TOKENS_MAX:
        raise InvalidInput(subject, f"must be a list of at most {TOKENS_MAX} token ids")
    for value in values:
        if type(value) is not int or not 0 <= value <= TOKEN_ID_MAX:
            raise InvalidInput(subject, f"{value!r} is no token id (0 to {TOKEN_ID_MAX})")
    if not values:
        raise InvalidInput(subject, "holds no token ids")
    return values


def _split_numbers(text: str) -> list[int]:
    return [int(word) for word in re.split(r"[\s,]+", text) if word]


def explain_prompt(
    source: ChunkSource, space: Namespace, tokens: Sequence[int], digest_of: TokensDigest
) -> Explanation:
    """Follow a prompt through one namespace."""
    census = estimate_chunks(source, space)
    follower = _Follower(source, space, census.parts, tokens, digest_of)
    cached, ahead = follower.follow([b""], 0)
    end_token = cached[-1].token_end if cached else 0
    chunk_tokens = max((p.token_end - p.token_start for p in [*cached[:1], *ahead]), default=0)
    bad = next((p for p in cached if p.parts != census.parts), None)
    rest = len(tokens) - end_token
    beyond: tuple[Position, ...] = ()
    is_searched = False
    if rest < max(chunk_tokens, 1):
        end = End.COMPLETE
    elif any(p.token_start == end_token and not _has_tokens(p) for p in ahead):
        end = End.TOKENS_UNKNOWN
    else:
        end = End.NO_CHUNK
        if census.files <= GAP_SEARCH_FILES_MAX:
            is_searched = True
            beyond = follower.search_beyond(end_token)
        if beyond:
            end = End.GAP
    if bad is not None:
        end = End.INCOMPLETE
    return Explanation(
        namespace=space,
        tokens=len(tokens),
        chunk_tokens=chunk_tokens,
        cached=tuple(cached),
        hit_tokens=end_token if bad is None else bad.token_start,
        end=end,
        missing_parts=frozenset() if bad is None else census.parts - bad.parts,
        beyond=beyond,
        is_searched=is_searched,
    )


def best_first(explanations: Sequence[Explanation]) -> list[Explanation]:
    """The one that hits most tokens first."""
    return sorted(explanations, key=lambda e: (-e.hit_tokens, -len(e.cached), e.namespace.name))


def _has_tokens(position: Position) -> bool:
    return any(entry.info.tokens_digest for entry in position.entries)


@dataclass(frozen=True, slots=True)
class _Link:
    position: Position
    before: "_Link | None"

    def chain(self) -> Iterator[Position]:
        link: _Link | None = self
        while link is not None:
            yield link.position
            link = link.before


class _Follower:
    """Follows one prompt through the tree of one namespace."""

    def __init__(
        self,
        source: ChunkSource,
        space: Namespace,
        parts: frozenset[Part],
        tokens: Sequence[int],
        digest_of: TokensDigest,
    ) -> None:
        self._source = source
        self._space = space
        self._parts = parts
        self._tokens = tokens
        self._digest_of = digest_of
        self._digests: dict[tuple[int, int], bytes] = {}

    def follow(self, parent: Sequence[bytes], start: int) -> tuple[list[Position], list[Position]]:
        """The longest chain of cached positions from `parent` on that holds the prompt's tokens
        from `start` on, and what else continues its end."""
        (ahead,) = read_positions(self._source, self._space, [parent])
        links = [_Link(p, None) for p in ahead if self.fits(p, start)]
        last: _Link | None = None
        while links:
            last = max(links, key=lambda link: link.position.parts == self._parts)
            fronts = links[:FORKS_MAX]
            found = read_positions(
                self._source, self._space, [self._keys(link.position) for link in fronts]
            )
            ahead = found[fronts.index(last)] if last in fronts else []
            links = [
                _Link(position, link)
                for link, positions in zip(fronts, found, strict=True)
                for position in positions
                if self.fits(position, link.position.token_end)
            ]
        return (list(last.chain())[::-1] if last is not None else []), ahead

    def fits(self, position: Position, start: int) -> bool:
        """Whether a position holds the prompt's own tokens from `start` on."""
        end = position.token_end
        if position.token_start != start or not start < end <= len(self._tokens):
            return False
        digest = self._digests.get((start, end))
        if digest is None:
            digest = self._digests[start, end] = self._digest_of(self._tokens[start:end])
        return any(entry.info.tokens_digest == digest for entry in position.entries)

    def search_beyond(self, start: int) -> tuple[Position, ...]:
        """The longest chain behind a gap: it starts with a chunk whose parent is gone."""
        walk = TreeWalk(self._source, self._space, self._parts)
        for _ in walk.runs():
            pass
        best: list[Position] = []
        for run in walk.orphans():
            head = run.head
            if run.level == 0 and head.token_start > start and self.fits(head, head.token_start):
                rest, _ = self.follow(self._keys(head), head.token_end)
                best = max(best, [head, *rest], key=len)
        return tuple(best)

    def _keys(self, position: Position) -> list[bytes]:
        return keys_of(position.stem, sorted(self._parts))
