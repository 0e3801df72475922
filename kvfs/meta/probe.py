"""What a metadata server says of itself to who only looks: whether it takes a node's words, and how
it keeps what it is given.

Nothing is written: the one change that is asked for removes a key that nobody makes. What its user
may not ask is not known, and that is no failure: a node needs none of it.
"""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import AskError, MovedError, TryAgainError

from kvfs.config import CLUSTER_DEADLINE_S
from kvfs.meta.primary import Link, Primary

_PINGS = 3
# With what `commit.lua`, `members.lua` and `gone.lua` need: keys, a change, the server's clock.
_TRIAL = "redis.call('TIME') redis.call('EXISTS', KEYS[1]) return redis.call('DEL', KEYS[2])"


@dataclass(frozen=True, slots=True)
class Memory:
    """How much a server may hold, and what it does then."""

    policy: str  # its maxmemory-policy
    used_bytes: int
    bytes_max: int  # 0: as much as the machine has
    evicted: int = 0  # keys, of anybody

    @property
    def evicts(self) -> bool:
        """Whether it was not told to keep all that it has."""
        return self.policy != "noeviction"

    @property
    def takes_names(self) -> bool:
        """Whether it takes keys away that say nothing of how long they live, as a cluster's do."""
        return self.policy.startswith("allkeys")


@dataclass(frozen=True, slots=True)
class Keeping:
    """What of its names outlives a server."""

    has_log: bool  # appendonly
    has_snapshots: bool | None  # save; None: its user may not ask
    has_failed: bool  # the last write of either
    replicas: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found. None: its user may not ask."""

    program: str  # redis, valkey
    version: str
    round_trip_s: float  # the shortest of a few
    has_cluster: bool  # names, or a root at least
    refusal: str  # of changes, in the server's words; empty: it takes them
    memory: Memory | None
    keeping: Keeping | None


def look_at(url: str, cluster: str) -> Facts:
    """Ask the server, or the primary of several, as a node of the cluster would. Each answer is
    waited for as a node waits for it. Raises `InvalidInput` for a URL that is none, `Unavailable`
    where nobody answers, as `Refused` where somebody must change something."""
    epoch, trial = (b"{kvfs:%b}:%b" % (cluster.encode(), name) for name in (b"epoch", b"trial"))
    with closing(Link(Primary(url, epoch), CLUSTER_DEADLINE_S)) as link:

        def ask(client: "redis.Redis") -> Facts:
            client.ping()
            program, version = _greeting(client)
            has_cluster = client.get(epoch) is not None
            refusal = ""
            try:
                client.eval(_TRIAL, 2, epoch, trial)
            except (MovedError, AskError, TryAgainError):
                raise
            except redis.ResponseError as error:
                refusal = str(error)
            info = _info(client)
            if info is not None:
                program = "valkey" if "valkey_version" in info else program
                version = str(info.get("valkey_version", version))
            return Facts(
                program,
                version,
                min(_ping_s(client) for _ in range(_PINGS)),
                has_cluster,
                refusal,
                None if info is None else read_memory(info),
                None if info is None else _keeping(info, client),
            )

        return link.ask(ask)


def _ping_s(client: "redis.Redis") -> float:
    began_s = time.perf_counter()
    client.ping()
    return time.perf_counter() - began_s


def _greeting(client: "redis.Redis") -> tuple[str, str]:
    """Who the server says that it is, which every user may ask."""
    try:
        answer: Any = client.execute_command(  # type: ignore[no-untyped-call]  # theirs has no types
            "HELLO", 2
        )
    except redis.ResponseError:
        return "server", ""  # of a version that does not know the word
    if not isinstance(answer, Mapping):
        answer = dict(zip(answer[::2], answer[1::2], strict=False))
    words = {_text(key): _text(value) for key, value in answer.items()}
    return words.get("server", "server"), words.get("version", "")


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _info(client: "redis.Redis") -> Mapping[str, Any] | None:
    try:
        info: Any = client.info()
    except redis.ResponseError:
        return None
    return info if isinstance(info, Mapping) and "maxmemory_policy" in info else None


def read_memory(info: Mapping[str, Any]) -> Memory:
    """Of what INFO says."""
    return Memory(
        str(info["maxmemory_policy"]),
        int(info.get("used_memory", 0)),
        int(info.get("maxmemory", 0)),
        int(info.get("evicted_keys", 0)),
    )


def _keeping(info: Mapping[str, Any], client: "redis.Redis") -> Keeping:
    try:
        saves: Any = client.config_get("save")
    except redis.ResponseError:
        saves = {}
    failed = "rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status"
    return Keeping(
        bool(info.get("aof_enabled", 0)),
        bool(saves["save"]) if "save" in saves else None,
        any(info.get(key, "ok") != "ok" for key in failed),
        int(info.get("connected_slaves", 0)),
    )
