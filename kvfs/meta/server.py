"""The server that holds a cluster's names, by its protocol: what a transaction needs of it.

All keys begin with `{kvfs:<cluster>}:`, so that they lie together also on a cluster of servers, and
a script may touch any of them. `commit.lua` writes names, nothing else does. Not thread-safe, but
for `wait_news` and `renew_lease`.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

import msgpack
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvfs.config import (
    CLUSTER_CHANGES_KEPT,
    CLUSTER_DEADLINE_S,
    CLUSTER_FEED_ENTRIES,
    CLUSTER_LISTEN_S,
    CLUSTER_NEWS_ENTRIES,
)
from kvfs.errors import InvalidInput, Unavailable
from kvfs.meta.shared import Commit, Page, Record, SharedTable
from kvfs.meta.silence import Silence

ENTRY_ORDER = "e"  # letter of the names of a directory in order; their values are in a hash
FEED_END = 2**63  # behind every entry of the feed: who begins there wants its number only
_HAS_VALUES = {SharedTable.DIRENT: ENTRY_ORDER}
_Answer = TypeVar("_Answer")


class Emptied(Unavailable):
    """The server has lost everything, or is another one."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """What a transaction saw is not what is there; None: of all, since the server was wiped."""

    changed: Record | Page | None


@dataclass(frozen=True, slots=True)
class Done:
    """A transaction went through, as the `sequence`th of the cluster."""

    sequence: int
    inodes: int


@dataclass(frozen=True, slots=True)
class News:
    """The feed since some entry, at most so much of it that there may be `more`."""

    epoch: bytes
    inodes: int
    sequence: int  # of the last entry that the server has
    entries: tuple[tuple[int, bytes, bytes], ...]  # sequence, node, what it wrote of it

    @property
    def is_all(self) -> bool:
        """Whether these entries lead to the last one."""
        return not self.entries or self.entries[-1][0] >= self.sequence


class MetaServer:
    """One node's connection to the server."""

    def __init__(self, url: str, cluster: str, node_id: bytes) -> None:
        """Raises `InvalidInput` for a URL that is none. Connects when it is first asked."""
        self.prefix = b"{kvfs:%b}:" % cluster.encode()
        self._node_id = node_id
        self._run = secrets.token_hex(8)
        self._serial = 0  # of the last transaction in this run
        self._silence = Silence()
        self.epoch = b""
        try:
            self._redis = _connect(url, CLUSTER_DEADLINE_S)
            self._listener = _connect(url, CLUSTER_LISTEN_S + CLUSTER_DEADLINE_S)
            self._redis.connection_pool.make_connection()  # which sees options that are none
        except (ValueError, TypeError) as error:
            raise InvalidInput("metadata URL", f"{error}; write redis://host:6379") from error
        self._commit = self._redis.register_script(_read_script("commit.lua"))
        self._news = self._redis.register_script(_read_script("news.lua"))
        self._begin = self._redis.register_script(_read_script("begin.lua"))
        self._dirents = self._redis.register_script(_read_script("dirents.lua"))
        self._lease = self._listener.register_script(_read_script("members.lua"))

    def close(self) -> None:
        self._redis.close()
        self._listener.close()

    def begin(self, root_inode: bytes, root_dirent: bytes) -> None:
        """Find the cluster on the server, or make it with an empty root."""
        args: list[Any] = [self.prefix, secrets.token_hex(16), root_inode, root_dirent]
        self.epoch = self._ask(lambda: self._begin(keys=[self._key(b"epoch")], args=args))

    def claim(self, name: bytes) -> bool:
        """Take something that only one node may have, for good; whether it is this node's."""
        key = self._key(b"claim:" + name)
        self._ask(lambda: self._redis.set(key, self._node_id, nx=True))
        return self._ask(lambda: self._redis.get(key)) == self._node_id

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
            for member, value in zip(members, next(answers), strict=True):
                found[Record(table, group + member)] = value
        return [found[record] for record in wanted]

    def dirents(self, keys: Sequence[bytes]) -> list[bytes]:
        """Directory entries by their keys, as the table holds them; `NO_DIRENT` for none. A tenth
        of the work that `values` has with them. Raises `Unavailable`."""
        asked = msgpack.packb(
            [part for key in keys for part in (key[:8], key[8:])], use_bin_type=False
        )
        args: list[Any] = [self.prefix, self.epoch, asked]
        found = self._ask(lambda: self._dirents(keys=[self._key(b"epoch")], args=args))
        if found is None:
            raise Emptied("the metadata server was emptied just now")
        return [found[at : at + 16] for at in range(0, len(found), 16)]

    def members(self, page: Page) -> tuple[bytes, ...]:
        """As `Source.members`."""
        letter = _HAS_VALUES.get(page.table, page.table.value)
        key = self._key(letter.encode() + page.group)
        [found] = self._read(
            lambda pipe: pipe.zrangebylex(key, b"[" + page.start, "+", 0, page.limit)
        )
        return tuple(found)

    def _read(self, ask: Callable[["redis.client.Pipeline"], object]) -> list[Any]:
        """Answers to several questions, in one round trip. `Unavailable` also from a server that
        has lost everything: nothing is there, which says nothing."""

        def question() -> list[Any]:
            with self._redis.pipeline(transaction=False) as pipe:
                pipe.get(self._key(b"epoch"))
                ask(pipe)
                return pipe.execute()

        epoch, *answers = self._ask(question)
        if epoch != self.epoch:
            raise Emptied("the metadata server was emptied just now")
        return answers

    def news(self, after: int) -> News:
        """What happened since an entry of the feed."""
        epoch, inodes, sequence, entries = self._ask(
            lambda: self._news(
                keys=[self._key(b"epoch")], args=[self.prefix, after, CLUSTER_NEWS_ENTRIES]
            )
        )
        return News(
            bytes(epoch),
            int(inodes),
            int(sequence),
            tuple(
                (int(entry_id.split(b"-")[0]), fields[1], fields[3]) for entry_id, fields in entries
            ),
        )

    def wait_news(self, after: int) -> bool:
        """Wait a while for an entry of the feed; for a thread of its own. Raises `Unavailable`."""
        feed: dict[Any, Any] = {self._key(b"feed"): f"{after}-0"}
        wait_ms = int(CLUSTER_LISTEN_S * 1000)
        news = _asking(lambda: self._listener.xread(feed, count=1, block=wait_ms))
        self._silence.note_answer()
        return bool(news)

    def renew_lease(self, words: bytes, lease_s: float, seen: int, *, is_new: bool) -> list[Any]:
        """As `members.lua` says; for a thread of its own. Raises `Unavailable`."""
        args: list[Any] = [
            self.prefix,
            self._node_id,
            words,
            int(lease_s * 1000),
            seen,
            int(is_new),
            CLUSTER_CHANGES_KEPT,
        ]
        answer: list[Any] = _asking(lambda: self._lease(keys=[self._key(b"epoch")], args=args))
        self._silence.note_answer()
        return answer

    # Writing -------------------------------------------------------------------------------------
    def commit(self, commit: Commit, news: bytes | None, inodes: int) -> Done | Conflict:
        """Compare and write; without `news` only compare. When the answer is lost it is asked for
        again, and nothing is done twice. Raises `Unavailable`: then it may have been done."""
        self._silence.check()
        self._serial += 1
        commit.was_sent = news is not None
        values, pages = list(commit.values.items()), list(commit.pages.items())
        packed = msgpack.packb(
            {
                "epoch": self.epoch,
                "node": self._node_id,
                "serial": f"{self._run}-{self._serial}",
                "values": [[*_place(record), value or False] for record, value in values],
                "pages": [
                    [
                        _HAS_VALUES.get(page.table, page.table.value),
                        page.group,
                        page.start,
                        page.limit,
                        members,
                    ]
                    for page, members in pages
                ],
                "writes": [_write(record, value) for record, value in commit.writes.items()],
                "inodes": inodes,
                "news": False if news is None else news,
                "kept": CLUSTER_FEED_ENTRIES,
            },
            use_bin_type=False,  # which the server's msgpack does not know
        )
        state, number, count = self._ask(
            lambda: self._commit(keys=[self._key(b"epoch")], args=[self.prefix, packed]), tries=2
        )
        if state == b"done":
            return Done(number, count)
        if state == b"epoch":
            return Conflict(None)
        return Conflict(values[number][0] if state == b"value" else pages[number][0])

    def _key(self, name: bytes) -> bytes:
        return self.prefix + name

    def _ask(self, question: Callable[[], _Answer], tries: int = 1) -> _Answer:
        """Ask the server. One that did not answer is left alone for a while."""
        self._silence.check()
        try:
            answer = _asking(question, tries)
        except Unavailable:
            self._silence.note_failure()
            raise
        self._silence.note_answer()
        return answer


def _asking(question: Callable[[], _Answer], tries: int = 1) -> _Answer:
    try:
        return question()
    except redis.AuthenticationError as error:
        raise InvalidInput("metadata URL", f"the server refuses its password: {error}") from error
    except redis.RedisError as error:
        if tries > 1:
            return _asking(question, tries - 1)
        raise Unavailable(f"the metadata server does not answer: {error}") from error


def _raw(answer: bytes | str) -> bytes:
    assert isinstance(answer, bytes)  # as long as nobody asks to decode answers
    return answer


def _connect(url: str, timeout_s: float | None) -> "redis.Redis":
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=CLUSTER_DEADLINE_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


def _place(record: Record) -> tuple[str, bytes, bytes | bool]:
    if record.is_grouped:
        return (record.table.value, *record.split())
    return record.table.value, record.key, False


def _write(record: Record, value: bytes | None) -> list[object]:
    order = _HAS_VALUES.get(record.table, False)
    stored: object = False if value is None else value
    if value is not None and record.is_grouped and not order:
        stored = True
    return [*_place(record), stored, order]


def _read_script(name: str) -> str:
    return files("kvfs.meta").joinpath(name).read_text(encoding="utf-8")
