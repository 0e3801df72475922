"""What a simulated cluster costs: what its metadata server says of itself, what nodes ask it, what
peers say, and memory."""

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import redis

from kvfs.meta.server import MetaServer

_PATIENCE_S = 60.0  # with the server: that this machine is busy breaks no promise
_READINGS = 20  # that say what a reading costs
_QUESTIONS = ("commit", "values", "dirents", "members", "news", "wait_news", "renew_lease",
              "begin", "claim")  # fmt: skip


class CountedServer(MetaServer):
    """Counts what a node asks the metadata server."""

    asked: ClassVar[Counter[str]] = Counter()  # of all nodes

    def __init__(self, url: str, cluster: str, node_id: bytes) -> None:
        super().__init__(url, cluster, node_id, _PATIENCE_S)


def _counted(name: str) -> Callable[..., Any]:
    method = getattr(MetaServer, name)

    def ask(self: CountedServer, *words: Any, **rest: Any) -> Any:
        CountedServer.asked[name] += 1
        return method(self, *words, **rest)

    return ask


for _name in _QUESTIONS:
    setattr(CountedServer, _name, _counted(_name))


def bytes_below(root: object, others: tuple[type, ...]) -> int:
    """Bytes of all objects that are reached from one, but for classes, modules and `others`."""
    seen: set[int] = set()
    waiting, total = [root], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (type, type(sys), *others)) or callable(one):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return total


@dataclass(slots=True)
class Cost:
    """Of so many operations of one kind, all together."""

    count: int = 0
    questions: int = 0  # to the metadata server
    to_server_bytes: int = 0
    from_server_bytes: int = 0
    server_us: float = 0.0  # of its processor
    script_us: float = 0.0  # of that, in scripts
    node_us: float = 0.0  # of the nodes' processor, and the simulation's
    peer_messages: int = 0
    peer_bytes: int = 0
    streamed_bytes: int = 0

    def add(self, other: "Cost") -> None:
        for name in Cost.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Meter:
    """Reads what the server says of itself, before and after operations of one kind."""

    def __init__(self, url: str, said: Counter[str]) -> None:
        """`said`: what peers have said so far, as the wire counts it."""
        self._redis = redis.Redis.from_url(url)
        self._said = said
        self.costs: dict[str, Cost] = {}
        self._overhead = Cost()  # of reading it
        readings = [self._read() for _ in range(_READINGS)]
        for name in ("to_server_bytes", "from_server_bytes", "server_us"):
            spent = getattr(readings[-1], name) - getattr(readings[3], name)
            setattr(self._overhead, name, spent / (len(readings) - 4))

    def close(self) -> None:
        self._redis.close()

    @contextmanager
    def of(self, kind: str, count: int) -> Iterator[None]:
        """What happens within is `count` operations of a kind."""
        before = self._read()
        yield
        after = self._read()
        spent = Cost(count)
        for name in Cost.__slots__[1:]:
            change = getattr(after, name) - getattr(before, name) - getattr(self._overhead, name)
            setattr(spent, name, max(0, change))
        self.costs.setdefault(kind, Cost()).add(spent)

    def _read(self) -> Cost:
        info = self._redis.info("stats", "cpu", "commandstats")
        said = self._said
        return Cost(
            0,
            CountedServer.asked.total(),
            info["total_net_input_bytes"],
            info["total_net_output_bytes"],
            (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6,
            info.get("cmdstat_evalsha", {}).get("usec", 0),
            time.process_time() * 1e6,
            said["messages"],
            said["bytes"],
            said["streamed_bytes"],
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Of this process, in bytes."""

    anonymous: int
    mapped: int

    @classmethod
    def now(cls) -> "Memory":
        gc.collect()
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        kib = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
        return cls(int(kib["RssAnon"]) * 1024, (int(kib["RssFile"]) + int(kib["RssShmem"])) * 1024)
