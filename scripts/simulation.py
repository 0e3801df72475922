"""A simulated cluster: what its nodes do, by a seed, and what must be so afterwards.

`simulate_cluster` says more, and runs it.
"""

import gc
import hashlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis
import trio

from kvfs.config import CLUSTER_RENEW_S
from kvfs.digest import digest_of
from kvfs.meta.contract import ChunkInfo, Inode, Publication
from kvfs.meta.members import Member
from kvfs.meta.shared import Record, SharedTable
from kvfs.names import chunk_key, chunk_path
from scripts.simulated_node import CLUSTER, T0_NS, SimulatedNode, Wire
from scripts.simulation_costs import Memory, Meter

NAMESPACE = b"kv/model@0123456789abcdef0123456789abcdef"
ROUNDS = 4  # of work in a step, besides the one while leases run
STORES, READS, EVICTIONS, REMOVALS = 8, 16, 4, 2  # in a round
CHUNKS_MAX = 4  # of one store
CHURN = 0.04  # of the nodes: as many leave, and as many are lost, in each step
AGREE_ROUNDS = 1  # of renewals in turn, after which all agree who is there
JOIN_BATCH = 100  # nodes that join before all others renew
PROBLEMS_MAX = 20
CACHES_CHECKED = 8


class Simulation:
    """What the nodes do, and what must be so."""

    def __init__(
        self, directory: Path, url: str, *, nodes: int, seed: int, loss: float, lease_s: float
    ) -> None:
        self._directory = directory
        self._url = url
        self._size = nodes
        self._seed = seed
        self._rng = random.Random(seed)
        self._lease_s = lease_s
        self._redis = redis.Redis.from_url(url)
        self._trace = hashlib.sha256()
        self._gone: dict[bytes, int] = {}  # when all who renew since must know that it went
        self._names: dict[bytes, Publication] = {}
        self._removed: list[bytes] = []
        self._lost: list[SimulatedNode] = []  # in this step
        self._away: list[SimulatedNode] = []
        self.wire = Wire(random.Random(f"wire-{seed}"), loss)
        self.wire.watch = self._watch
        self.meter = Meter(url, self.wire.counts)
        self.present: list[SimulatedNode] = []
        self.problems: list[str] = []
        self.memory: dict[str, float] = {}

    def close(self) -> None:
        for node in self.present:
            node.vanish()
        self.meter.close()
        self._redis.flushall()  # the server is for this one alone
        self._redis.close()

    async def run(self, steps: int) -> None:
        """All nodes join; then so many steps."""
        before = Memory.now()
        await self._join([self._new_node(index) for index in range(self._size)], "join")
        self._weigh("joined", before)
        gc.freeze()  # as a node does with what it has loaded
        for number in range(steps):
            say(f"{self._size} nodes: step {number + 1} of {steps}")
            await self.step()
        gc.unfreeze()
        self._weigh("end", before)

    def _weigh(self, when: str, before: Memory) -> None:
        now, count = Memory.now(), len(self.present)
        self.memory[f"{when}_anonymous_bytes"] = (now.anonymous - before.anonymous) / count
        self.memory[f"{when}_mapped_bytes"] = (now.mapped - before.mapped) / count
        sample = self.present[:: max(1, count // CACHES_CHECKED)]
        for name in ("cache_bytes", "members_bytes"):
            sizes = [node.memory_bytes()[name] for node in sample]
            self.memory[f"{when}_{name}"] = sum(sizes) / len(sizes)

    async def step(self) -> None:
        """Nodes go, others work, nodes come, all work; then everything is checked."""
        go = max(1, int(self._size * CHURN))
        self._go(go, is_lost=False)
        self._go(go, is_lost=True)
        await self._work("blind")
        await self._wait_leases()
        await self._come(go)
        for _ in range(ROUNDS):
            await self._work("")
            with self.meter.of("renew", len(self.present)):
                await self._renew()
        await self.check()

    # Who is there ---------------------------------------------------------------------------------
    def _new_node(self, index: int) -> SimulatedNode:
        return SimulatedNode(self._directory, self._url, self.wire, index, self._seed)

    async def _join(self, nodes: Sequence[SimulatedNode], kind: str) -> None:
        for start in range(0, len(nodes), JOIN_BATCH):
            batch = nodes[start : start + JOIN_BATCH]
            with self.meter.of(kind, len(batch)):
                for node in batch:
                    self._gone.pop(node.node_id, None)
                    await node.join(self._lease_s)
                    self.present.append(node)
                    self._note("join", node)
            with self.meter.of(f"renew after {kind}", len(self.present)):
                await self._renew()
            say(f"{self._size} nodes: {len(self.present)} are there")

    def _go(self, count: int, *, is_lost: bool) -> None:
        with self.meter.of("lose" if is_lost else "leave", count):
            for node in self._rng.sample(self.present, min(count, len(self.present) - 1)):
                self.present.remove(node)
                if is_lost:
                    node.vanish()
                    self._lost.append(node)
                else:
                    node.leave()
                    self._mark_gone(node)
                self._away.append(node)
                self._note("lose" if is_lost else "leave", node)

    async def _wait_leases(self) -> None:
        """The others go on renewing until the leases of the lost have ended."""
        end_s = max((node.lease_end_s for node in self._lost), default=0.0)
        while time.monotonic() <= end_s:
            turn_s = time.monotonic() + CLUSTER_RENEW_S
            await self._renew()
            await trio.sleep(max(0.0, min(turn_s, end_s + 0.01) - time.monotonic()))
        for node in self._lost:
            self._mark_gone(node)
        self._lost.clear()
        with self.meter.of("renew after losses", len(self.present)):
            await self._renew()

    def _mark_gone(self, node: SimulatedNode) -> None:
        self.wire.ticks += 1
        self._gone[node.node_id] = self.wire.ticks

    async def _come(self, count: int) -> None:
        """Some of those that were away come back with their files, and new ones join."""
        back = self._rng.sample(self._away, min(count, len(self._away)))
        self._away = [node for node in self._away if node not in back]
        await self._join(back, "return")
        with self.meter.of("recheck", len(back)):
            for node in back:
                node.recheck()
        index = len(self.present) + len(self._away)
        await self._join([self._new_node(index + n) for n in range(count)], "join later")

    async def _renew(self) -> None:
        for node in self.present:
            await node.renew()

    def _watch(self, asker: SimulatedNode, asked: Member) -> None:
        gone = self._gone.get(asked.node_id)
        if gone is not None and gone < asker.renewed_tick:
            self._complain(f"node {asker.index} asks {asked.host}, which it must know has gone")

    # What they do ---------------------------------------------------------------------------------
    async def _work(self, suffix: str) -> None:
        """One round: nodes chosen by chance do something, then all hear of it."""
        for kind, count in (("read", READS), ("evict", EVICTIONS), ("remove", REMOVALS)):
            with self.meter.of(f"{kind} {suffix}".strip(), count):
                for node in self._rng.choices(self.present, k=count):
                    self.wire.ticks += 1
                    if kind == "read":
                        await self._read(node)
                    elif kind == "evict":
                        self._evict(node)
                    else:
                        self._remove(node)
        with self.meter.of(f"store {suffix}".strip(), STORES):
            for node in self._rng.choices(self.present, k=STORES):
                self._store(node, self._rng.randint(1, CHUNKS_MAX))
        self._hear(f"hear {STORES + READS + EVICTIONS + REMOVALS}")
        self._store(self._rng.choice(self.present), 1)
        self._hear("hear 1")

    def _hear(self, kind: str) -> None:
        with self.meter.of(kind, len(self.present)):
            for node in self.present:
                node.engine.wait_news()
                node.engine.catch_up()
                node.reap()

    def _store(self, node: SimulatedNode, chunks: int) -> None:
        """New chunks of a prompt, or ones that another node has computed as well."""
        self.wire.ticks += 1
        if self._names and self._rng.random() < 0.2:
            path = self._choose_name()
            data = self._content(path)
            files = [(path, data, self._names[path].chunk)]
        else:
            keys = [self._rng.randbytes(16) for _ in range(chunks)]
            files = []
            for place, key in enumerate(keys):
                path = chunk_path(NAMESPACE, chunk_key(key, 0, 0))
                parent = chunk_key(keys[place - 1], 0, 0).encode() if place else b""
                info = ChunkInfo(
                    chunk_key(key, 0, 0).encode(), parent, 256 * place, 256 * (place + 1), 0, 0, b""
                )
                files.append((path, self._content(path), info))
        now_ns = T0_NS + self.wire.ticks * 1000
        publications = [
            (Publication(digest_of(d), len(d), 4096, 0, now_ns, path=path, chunk=info), d)
            for path, d, info in files
        ]
        node.store(publications, now_ns)
        for one, _ in publications:
            self._names[one.path] = one
            self._note("store", node, one.digest)

    def _content(self, path: bytes) -> bytes:
        """The bytes of a file: the same whoever computes them."""
        rng = random.Random(path)
        return rng.randbytes(rng.randint(1, 512))

    def _choose_name(self) -> bytes:
        """Old ones more often, as shared prompts are."""
        return list(self._names)[int(len(self._names) * self._rng.random() ** 3)]

    async def _read(self, node: SimulatedNode) -> None:
        if not self._names:
            return
        path = self._choose_name()
        inode = self._look_up(node, path)
        data = None if inode is None else node.disk.get(inode.digest)
        if inode is not None and data is None:
            data = await node.fetch(inode)
            if data is not None and not node.add_copy(inode, data):
                self._complain(f"node {node.index}: what it has read has no name any more")
        self._judge(node, path, inode, data)
        self._note("read", node, data or b"")

    def _look_up(self, node: SimulatedNode, path: bytes) -> Inode | None:
        """As every open does: what is new first."""
        node.engine.catch_up()
        [inode] = node.engine.resolve([path])
        return inode

    def _judge(
        self, node: SimulatedNode, path: bytes, inode: Inode | None, data: bytes | None
    ) -> None:
        """Was that right? Bytes must come if anybody who is there has them."""
        wanted = self._names.get(path)
        if (inode and inode.digest) != (wanted and wanted.digest):
            self._complain(f"node {node.index}: {path!r} is {inode}, not {wanted}")
        elif inode is not None and data is None and self._holders(inode.digest):
            self._complain(f"node {node.index} does not get {path!r}, which others have")
        elif data is not None and data != self._content(path):
            self._complain(f"node {node.index}: {path!r} has wrong bytes")

    def _holders(self, digest: bytes) -> list[SimulatedNode]:
        return [node for node in self.present if digest in node.disk]

    def _evict(self, node: SimulatedNode) -> None:
        """The coldest files lose their copies here, or their names where this is the last."""
        node.engine.catch_up()
        coldest = node.engine.coldest(2)
        given_up = set(node.location.give_up([one.digest for one in coldest]))
        last = [one.ino for one in coldest if one.digest not in given_up]
        gone = node.engine.unlink_all(last, T0_NS + self.wire.ticks * 1000)
        node.engine.forget(last)
        node.reap()
        for _, name, _ in gone:
            self._forget_name(b"%b/%b/%b" % (NAMESPACE, name[:2], name))
        self._note("evict", node, b"".join(sorted(given_up)), b"".join(n for _, n, _ in gone))

    def _remove(self, node: SimulatedNode) -> None:
        if not self._names:
            return
        path = self._choose_name()
        above, _, name = path.rpartition(b"/")
        node.engine.catch_up()
        [directory] = node.engine.resolve([above])
        assert directory is not None
        gone = node.engine.unlink(directory.ino, name, T0_NS + self.wire.ticks * 1000)
        node.engine.forget([gone.ino])
        node.reap()
        self._forget_name(path)
        self._note("remove", node, path)

    def _forget_name(self, path: bytes) -> None:
        del self._names[path]
        self._removed.append(path)

    # What must be so ------------------------------------------------------------------------------
    async def check(self) -> None:
        """Everything that a step must leave as it says."""
        for node in self.present:
            node.engine.catch_up()
            node.reap()
        for _ in range(AGREE_ROUNDS):
            await self._renew()
        there = {node.node_id for node in self.present}
        for node in self.present:
            known = {member.node_id for member in node.membership.present}
            if known != there:
                self._complain(
                    f"node {node.index} misses {len(there - known)} nodes that are there, and knows"
                    f" {len(known - there)} that are not"
                )
        await self._check_names()
        self._check_copies()
        for node in self._rng.sample(self.present, min(CACHES_CHECKED, len(self.present))):
            self._check_cache(node)

    async def _check_names(self) -> None:
        for path in [*self._names, *self._removed]:
            node = self._rng.choice(self.present)
            inode = self._look_up(node, path)
            data = None if inode is None else node.disk.get(inode.digest)
            if inode is not None and data is None:
                data = await node.fetch(inode)
            self._judge(node, path, inode, data)
        self._removed.clear()

    def _check_copies(self) -> None:
        """The server says of each node that is there that it has what it has."""
        prefix = b"{kvfs:%b}:o" % CLUSTER.encode()
        said: dict[bytes, set[bytes]] = {}
        for key in self._redis.scan_iter(match=prefix + b"*", count=1000):
            for node_id in self._redis.zrange(key, 0, -1):
                said.setdefault(node_id, set()).add(key.removeprefix(prefix))
        for node in self.present:
            recorded, has = said.get(node.node_id, set()), set(node.disk)
            if recorded != has or node.engine.usage().blobs != len(has):
                self._complain(
                    f"node {node.index}: {len(recorded - has)} copies are recorded that it has not,"
                    f" {len(has - recorded)} are not that it has"
                )

    def _check_cache(self, node: SimulatedNode) -> None:
        node.engine.catch_up()
        for record, value in node.cached_values().items():
            if self._stored(record) != value:
                self._complain(f"node {node.index}: {record} is cached as it was")

    def _stored(self, record: Record) -> bytes | None:
        prefix = b"{kvfs:%b}:%b" % (CLUSTER.encode(), record.table.value.encode())
        if not record.is_grouped:
            return self._redis.get(prefix + record.key)
        group, member = record.split()
        if record.table is SharedTable.DIRENT:
            return self._redis.hget(prefix + group, member)
        return None if self._redis.zscore(prefix + group, member) is None else b""

    # What is told ---------------------------------------------------------------------------------
    def _note(self, what: str, node: SimulatedNode, *things: bytes) -> None:
        self._trace.update(b"%b %d %b;" % (what.encode(), node.index, b" ".join(things)))

    def _complain(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)

    def report(self) -> dict[str, Any]:
        """For JSON, and for the table."""
        return {
            "nodes": self._size,
            "seed": self._seed,
            "trace": self._trace.hexdigest()[:16],
            "names": len(self._names),
            "wire": dict(self.wire.counts),
            "memory": self.memory,
            "costs": {kind: asdict(cost) for kind, cost in self.meter.costs.items()},
            "problems": self.problems,
        }


def say(what: str) -> None:
    """Progress, for who waits."""
    print(what, file=sys.stderr)
