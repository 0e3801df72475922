"""The server that holds a cluster's names, by its protocol: what a transaction needs of it.

All keys begin with `{kvfs:<cluster>}:`, so that they lie together also on a cluster of servers, and
a script may touch any of them. `commit.lua` writes names, nothing else does. Not thread-safe, but
for `wait_news` and `renew_lease`.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain
from typing import Any, TypeVar

import msgpack
import redis

from kvfs.config import (
    CLUSTER_CHANGES_KEPT,
    CLUSTER_DEADLINE_S,
    CLUSTER_LISTEN_S,
    CLUSTER_STRANGE_S,
)
from kvfs.errors import Unavailable
from kvfs.meta.bulk import DirentsQuestion
from kvfs.meta.commit_words import keys_of, order_of, pack_commit
from kvfs.meta.contract import DIGEST_BYTES
from kvfs.meta.exchange import exchange
from kvfs.meta.journal import Point, Standing
from kvfs.meta.news import News, NewsAnswer, NewsQuestion, read_entry, read_news
from kvfs.meta.primary import Link, Primary, Unwilling
from kvfs.meta.probe import Memory, read_memory
from kvfs.meta.records import NO_DIRENT
from kvfs.meta.shared import NODE_ID_BYTES, Commit, Page, Record, SharedTable
from kvfs.meta.silence import Silence
from kvfs.meta.url import Form

_SCRIPTS = ("begin", "commit", "members", "sweep", "history", "gone")
_UNSOUND = "the metadata server does not keep its counters: see who else writes to its keys"
_ROOT_GROUP = bytes(8)
_BEGIN_KEYS = (
    b"i" + (1).to_bytes(8, "little"), b"d" + _ROOT_GROUP, b"e" + _ROOT_GROUP,
    b"inodes", b"seq", b"feed", b"last", b"mark",
)  # fmt: skip
_FEED_KEYS = (b"seq", b"feed")
_Answer = TypeVar("_Answer")


class Emptied(Unavailable):
    """The server has lost everything, or is another one."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """What a transaction saw is not what is there; None: of all, since the server was wiped."""

    changed: Record | Page | None


@dataclass(frozen=True, slots=True)
class Done:
    """A transaction went through, at this place in the cluster's history."""

    at: Point
    inodes: int


class MetaServer:
    """One node's connection to the server."""

    def __init__(
        self, url: str, cluster: str, node_id: bytes, deadline_s: float = CLUSTER_DEADLINE_S
    ) -> None:
        """`deadline_s`: for each answer. Raises `InvalidInput` for a URL that is none. Connects
        when it is first asked."""
        self.prefix = b"{kvfs:%b}:" % cluster.encode()
        self._node_id = node_id
        self._run = secrets.token_hex(8)
        self._serial = 0  # of the last transaction in this run
        self._silence = Silence()
        self.epoch = b""
        self.inodes = 0  # of the cluster, as far as this node heard
        self._root = b"", b""
        primary = Primary(url, self._key(b"epoch"))
        self._deadline_s = deadline_s
        self._link = Link(primary, deadline_s)
        self._listener = Link(primary, CLUSTER_LISTEN_S + deadline_s)
        self._names_all_keys = primary.url.form is Form.CLUSTER
        self._scripts = {name: _Script.read(name) for name in _SCRIPTS}

    def close(self) -> None:
        self._link.close()
        self._listener.close()

    def begin(self, root_inode: bytes, root_dirent: bytes) -> None:
        """Find the cluster on the server, or make it with an empty root."""
        self._root = root_inode, root_dirent
        self.epoch = self._say_begin()

    def mend(self) -> None:
        """Make anew what the server has lost, or holds garbage for, of what all nodes count on; as
        `begin`, but who has another epoch than this node knew of finds it later. Raises
        `Unavailable`."""
        self._say_begin()

    def _say_begin(self) -> bytes:
        args = [self.prefix, secrets.token_hex(16), *self._root, self.inodes]
        epoch: bytes = self._run_script("begin", args, _BEGIN_KEYS)
        return epoch

    def claim(self, name: bytes) -> bool:
        """Take something that only one node may have, for good; whether it is this node's."""
        key = self._key(b"claim:" + name)
        self._ask(lambda client: client.set(key, self._node_id, nx=True))
        found: list[Any] = self._ask(lambda client: client.mget([key]))  # nothing of another kind
        return found == [self._node_id]

    # Reading -------------------------------------------------------------------------------------
    def values(self, wanted: Sequence[Record]) -> list[bytes | None]:
        """As `Source.values`, in one round trip."""
        if not wanted:
            return []
        groups: dict[tuple[SharedTable, bytes], list[bytes]] = {}
        points: list[Record] = []
        for record in wanted:
            if record.is_grouped:
                group, member = record.split()
                groups.setdefault((record.table, group), []).append(member)
            else:
                points.append(record)

        def ask(pipe: "redis.client.Pipeline") -> None:
            if points:
                pipe.mget([self._key(r.table.value.encode() + r.key) for r in points])
            for (table, group), members in groups.items():
                pipe.hmget(self._key(table.value.encode() + group), members)

        answers = iter(self._read(ask))
        found: dict[Record, bytes | None] = {}
        if points:
            found.update(zip(points, next(answers), strict=True))
        for (table, group), members in groups.items():
            values = next(answers) or [None] * len(members)
            for member, value in zip(members, values, strict=True):
                found[Record(table, group + member)] = value
        return [found[record] for record in wanted]

    def dirents(self, groups: Mapping[bytes, Sequence[bytes]]) -> list[bytes]:
        """Directory entries by their keys, which `bulk.by_directory` has put together, in that
        order: as the table holds them, `NO_DIRENT` for none. A tenth of the work that `values` has
        with them. Raises `Unavailable`."""

        def question(client: "redis.Redis") -> list[bytes] | None:
            asked = DirentsQuestion(groups, self.prefix, self.epoch)
            return exchange(client, asked, self._deadline_s)

        found = self._ask(question)
        if found is not None:
            return found
        keys = chain.from_iterable(groups.values())
        values = self.values([Record(SharedTable.DIRENT, key) for key in keys])
        return [value if value and len(value) == len(NO_DIRENT) else NO_DIRENT for value in values]

    def members(self, page: Page) -> tuple[bytes, ...]:
        """As `Source.members`."""
        return self.pages([page])[0]

    def pages(self, wanted: Sequence[Page]) -> list[tuple[bytes, ...]]:
        """As `members`, of many pages in one round trip."""

        def ask(pipe: "redis.client.Pipeline") -> None:
            for page in wanted:
                key = self._key(order_of(page.table).encode() + page.group)
                pipe.zrangebylex(key, b"[" + page.start, "+", 0, page.limit)

        return [tuple(found or ()) for found in self._read(ask)]

    def _read(self, ask: Callable[["redis.client.Pipeline"], object]) -> list[Any]:
        """Answers to several questions, in one round trip. `Unavailable` also from a server that
        has lost everything: nothing is there, which says nothing."""

        def question(client: "redis.Redis") -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                pipe.get(self._key(b"epoch"))
                ask(pipe)
                return _without_strange(pipe.execute(raise_on_error=False))

        epoch, *answers = self._ask(question)
        if epoch != self.epoch:
            raise Emptied("the metadata server was emptied just now")
        return answers

    def news(self, after: int) -> News:
        """What happened since an entry of the feed. What others put there is left out, and a
        counter that is lost is made anew before. Raises `Unavailable`."""
        for _ in range(2):
            found = self._read_news(after)
            if found is not None:
                self.inodes = found.inodes
                return found
            self.mend()
        raise Unavailable(_UNSOUND)

    def _read_news(self, after: int) -> News | None:
        def question(client: "redis.Redis") -> NewsAnswer:
            news = NewsQuestion(self.prefix, after)
            # No script: that would take each entry apart, five times the server's work.
            answer = exchange(client, news, self._deadline_s)
            if answer is not None:
                return answer
            with client.pipeline(transaction=False) as pipe:
                pipe.mget(news.counters)
                pipe.xrange(news.feed, *news.bounds)
                return NewsAnswer(*_without_strange(pipe.execute(raise_on_error=False)))

        return read_news(self._ask(question), after, self.epoch)

    def history(self, points: Sequence[Point]) -> list[Standing]:
        """Whether the server has what a node knows of. Raises `Unavailable`."""
        asked = msgpack.packb(
            [part for point in points for part in (point.sequence, point.mark)], use_bin_type=False
        )
        found = self._run_script("history", [self.prefix, asked], _FEED_KEYS)
        return [Standing(standing) for standing in found]

    def wait_news(self, after: int) -> bool:
        """Wait a while for an entry of the feed; for a thread of its own. Raises `Unavailable`."""
        feed: dict[Any, Any] = {self._key(b"feed"): f"{after}-0"}
        wait_ms = int(CLUSTER_LISTEN_S * 1000)

        def question(client: "redis.Redis") -> Any:
            try:
                return client.xread(feed, count=1, block=wait_ms)
            except redis.ResponseError as error:
                if not _is_strange(error):
                    raise
            return None

        began_s = time.monotonic()
        news = self._listener.ask(question)
        self._silence.note_answer()
        entries = [entry for _, found in news or () for entry in found]
        is_ours = any(read_entry(*entry) is not None for entry in entries)
        if not is_ours and time.monotonic() - began_s < CLUSTER_STRANGE_S:
            time.sleep(CLUSTER_STRANGE_S)  # others' entries would be there again at once
        return is_ours

    def renew_lease(self, words: bytes, lease_s: float, seen: int, *, is_new: bool) -> list[Any]:
        """As `members.lua` says; for a thread of its own. Raises `Unavailable`."""
        args = [
            self.prefix,
            self._node_id,
            words,
            int(lease_s * 1000),
            seen,
            int(is_new),
            CLUSTER_CHANGES_KEPT,
        ]
        answer: list[Any] = self._listener.ask(self._script_question("members", args))
        self._silence.note_answer()
        return answer

    def digests_of(
        self, node_ids: Sequence[bytes], cursor: bytes, keys: int
    ) -> tuple[bytes, list[bytes]]:
        """Some of the digests that one of these nodes is said to have; and where to go on, `b"0"`
        at the end, as at the beginning. Looks at about so many keys."""
        after, digests = self._run_script("sweep", [self.prefix, cursor, keys, *node_ids])
        return after, [digest for digest in digests if len(digest) == DIGEST_BYTES]

    def gone_nodes(self, after_s: float, limit: int, settled: bytes) -> list[bytes]:
        """Nodes whose lease has been over for so long and that have not been `settled`: left with
        nothing on the list of what they have not finished."""
        args = [self.prefix, int(after_s * 1000), limit, settled]
        found: list[bytes] = self._run_script("gone", args)
        return [node_id for node_id in found if len(node_id) == NODE_ID_BYTES]

    def member_words(self, node_id: bytes) -> bytes | None:
        """What a node says of itself whose lease has not ended. Raises `Unavailable`."""
        members, leases = self._key(b"members"), self._key(b"leases")

        def question(client: "redis.Redis") -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                pipe.hget(members, node_id)
                pipe.zscore(leases, node_id)
                pipe.time()
                return _without_strange(pipe.execute(raise_on_error=False))

        words, until_ms, (seconds, micros) = self._ask(question)
        is_there = until_ms is not None and until_ms > seconds * 1000 + micros // 1000
        return words if is_there else None

    def memory(self) -> Memory | None:
        """What the server does when it is full; None where this node's user may not ask. For a
        thread of its own. Raises `Unavailable`."""

        def question(client: "redis.Redis") -> Any:
            try:
                return client.info()
            except redis.ResponseError:  # of an answer that names need nothing of
                return None

        info = self._listener.ask(question)
        is_told = isinstance(info, Mapping) and "maxmemory_policy" in info
        return read_memory(info) if is_told else None

    # Writing -------------------------------------------------------------------------------------
    def commit(self, commit: Commit, news: bytes | None, inodes: int) -> Done | Conflict:
        """Compare and write; without `news` only compare. When the answer is lost it is asked for
        again, and nothing is done twice. Raises `Unavailable`: then it may have been done."""
        self._silence.check()
        self._serial += 1
        commit.was_sent = news is not None
        packed = pack_commit(
            commit,
            epoch=self.epoch,
            node_id=self._node_id,
            serial=f"{self._run}-{self._serial}",
            news=news,
            inodes=inodes,
        )
        question = self._script_question(
            "commit", [self.prefix, packed], keys_of(commit, self._node_id)
        )
        state, number, count, *mark = self._ask(question, tries=2)
        if state == b"unsound":
            self.mend()
            state, number, count, *mark = self._ask(question, tries=2)
        if state == b"unsound":
            raise Unavailable(_UNSOUND)
        if state == b"done":
            self.inodes = count
            return Done(Point(number, mark[0]), count)
        if state == b"epoch":
            return Conflict(None)
        return Conflict(list(commit.values if state == b"value" else commit.pages)[number])

    def _key(self, name: bytes) -> bytes:
        return self.prefix + name

    def _run_script(self, name: str, args: Sequence[Any], keys: Sequence[bytes] = ()) -> Any:
        return self._ask(self._script_question(name, args, keys))

    def _script_question(
        self, name: str, args: Sequence[Any], keys: Sequence[bytes] = ()
    ) -> "Callable[[redis.Redis], Any]":
        """`keys`: all that the script touches, besides the epoch. A server of a cluster refuses one
        whose keys are just being moved away, before it has done anything, if it is told of them."""
        told = [b"epoch", *keys] if self._names_all_keys else [b"epoch"]
        script, words = self._scripts[name], (len(told), *map(self._key, told), *args)

        def question(client: "redis.Redis") -> Any:
            try:
                return client.evalsha(script.sha, *words)
            except redis.exceptions.NoScriptError:
                return client.eval(script.text, *words)

        return question

    def _ask(self, question: "Callable[[redis.Redis], _Answer]", tries: int = 1) -> _Answer:
        """Ask the server. One that did not answer is left alone for a while."""
        self._silence.check()
        try:
            answer = self._link.ask(question, tries)
        except Unwilling:
            self._silence.note_answer()
            raise
        except Unavailable as error:
            self._silence.note_failure(error)
            raise
        self._silence.note_answer()
        return answer


@dataclass(frozen=True, slots=True)
class _Script:
    text: str
    sha: str  # by which the server knows it again

    @classmethod
    def read(cls, name: str) -> "_Script":
        text = files("kvfs.meta").joinpath(f"{name}.lua").read_text(encoding="utf-8")
        return cls(text, hashlib.sha1(text.encode()).hexdigest())


def _without_strange(answers: list[Any]) -> list[Any]:
    """The answers to several questions; None from a key of another kind than ours, which is as one
    that is not there. Raises the first other error."""
    for index, answer in enumerate(answers):
        if isinstance(answer, Exception):
            if not _is_strange(answer):
                raise answer
            answers[index] = None
    return answers


def _is_strange(error: Exception) -> bool:
    return isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE")
