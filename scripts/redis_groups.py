"""Several real servers of Redis's protocol that are one: a primary with a replica that Sentinels
watch, and a Redis cluster. For tests."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.redis_rig import START_S, RedisServer, free_port, redis_server

SERVICE = "names"
_SLOTS = 16_384
_DOWN_MS = 500  # how long a server is silent before the others call it dead


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Until it holds."""
    end_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError(f"did not happen: {what}")
        time.sleep(0.02)


def is_replica_in_step(server: RedisServer) -> bool:
    """Whether a replica has its primary's data and hears what is new."""
    return "master_link_status:up" in server.say("info", "replication")


class Watched:
    """A primary, its replica, and three Sentinels; `url` names the Sentinels."""

    def __init__(
        self, primary: RedisServer, replica: RedisServer, sentinels: list[RedisServer]
    ) -> None:
        self.primary = primary
        self.replica = replica
        self.sentinels = sentinels
        hosts = ",".join(f"127.0.0.1:{s.port}" for s in sentinels)
        self.url = f"redis+sentinel://{hosts}/{SERVICE}"

    def wait_for_failover(self) -> None:
        """Until the replica is the primary."""
        wait_for(lambda: self.replica.say("role").startswith("master"), "a failover")


@contextmanager
def watched_servers(directory: Path, program: str = "redis-server") -> Iterator[Watched]:
    """See `Watched`; for the length of a `with` block."""
    with ExitStack() as stack:
        primary = stack.enter_context(redis_server(directory / "a", program))
        follow = ("--replicaof", f"127.0.0.1 {primary.port}", "--repl-diskless-sync-delay", "0")
        replica = stack.enter_context(redis_server(directory / "b", program, follow))
        wait_for(lambda: is_replica_in_step(replica), "replication")
        sentinels = [
            stack.enter_context(_sentinel(directory / f"s{n}", primary.port, program))
            for n in range(3)
        ]
        wait_for(lambda: all(map(_knows_all, sentinels)), "Sentinels that know each other")
        yield Watched(primary, replica, sentinels)


def _knows_all(sentinel: RedisServer) -> bool:
    known = sentinel.say("sentinel", "master", SERVICE).split()
    facts = dict(zip(known[::2], known[1::2], strict=False))
    return facts.get("num-slaves") == "1" and facts.get("num-other-sentinels") == "2"


@contextmanager
def _sentinel(directory: Path, watched: int, program: str) -> Iterator[RedisServer]:
    directory.mkdir(parents=True)
    port = free_port()
    written = directory / "sentinel.conf"
    written.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {watched} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} {_DOWN_MS}\n"
        f"sentinel failover-timeout {SERVICE} 4000\n"
    )
    server = SentinelServer(directory, port, program=program)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class SentinelServer(RedisServer):
    """A server whose only word is where another one is."""

    def arguments(self) -> list[str]:
        return [str(self.directory / "sentinel.conf"), "--sentinel"]


class Sharded:
    """A Redis cluster of three primaries, of which the first has almost all slots, and its replica.
    `url` names the second, so that whoever asks is sent on."""

    def __init__(self, primaries: list[RedisServer], replica: RedisServer) -> None:
        self.primaries = primaries
        self.replica = replica
        self.url = f"redis+cluster://127.0.0.1:{primaries[1].port},127.0.0.1:{primaries[2].port}"

    def node_id(self, server: RedisServer) -> str:
        return server.say("cluster", "myid").strip()

    def wait_for_failover(self) -> None:
        """Until the replica is a primary and the others know."""
        me = self.node_id(self.replica)

        def is_known_to(server: RedisServer) -> bool:
            lines = server.say("cluster", "nodes").splitlines()
            return any(me in line and "master" in line for line in lines)

        others = (self.replica, *self.primaries[1:])
        wait_for(lambda: all(map(is_known_to, others)), "a failover")


@contextmanager
def sharded_servers(directory: Path, program: str = "redis-server") -> Iterator[Sharded]:
    """See `Sharded`; for the length of a `with` block."""
    options = (
        "--cluster-enabled", "yes", "--cluster-node-timeout", str(2 * _DOWN_MS),
        "--repl-diskless-sync-delay", "0", "--cluster-require-full-coverage", "no",
    )  # fmt: skip
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                redis_server(
                    directory / str(n), program, (*options, "--cluster-port", str(free_port()))
                )
            )
            for n in range(4)
        ]
        sharded = Sharded(servers[:3], servers[3])
        for first, last, server in (
            (0, _SLOTS - 3, servers[0]),
            (_SLOTS - 2, _SLOTS - 2, servers[1]),
            (_SLOTS - 1, _SLOTS - 1, servers[2]),
        ):
            server.say("cluster", "addslotsrange", str(first), str(last))
        bus = servers[0].say("config", "get", "cluster-port").split()[-1]
        for number, server in enumerate(servers[1:], 2):
            server.say("cluster", "set-config-epoch", str(number))
            server.say("cluster", "meet", "127.0.0.1", str(servers[0].port), bus)
        wait_for(
            lambda: all("cluster_known_nodes:4" in s.say("cluster", "info") for s in servers),
            "servers that know each other",
        )
        first_id = sharded.node_id(servers[0])
        wait_for(
            lambda: servers[3].say("cluster", "replicate", first_id).startswith("OK"), "a replica"
        )
        wait_for(lambda: is_replica_in_step(servers[3]), "replication")
        wait_for(
            lambda: all("cluster_state:ok" in s.say("cluster", "info") for s in servers),
            "a cluster",
        )
        yield sharded
