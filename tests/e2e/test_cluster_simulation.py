"""`scripts/simulate_cluster.py` with few nodes: what it checks holds, and each check can fail."""

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from scripts.redis_rig import RedisServer, redis_server
from scripts.simulate_cluster import simulate
from scripts.simulation import Simulation

ROOT = Path(__file__).parents[2]
NODES = 6
LEASE_S = 3.0  # long for a turn of so few, short to wait for


def test_a_small_cluster_keeps_its_promises_and_the_same_seed_does_the_same(
    tmp_path: Path,
) -> None:
    reports = [
        simulate(tmp_path / str(n), nodes=10, steps=2, seed=2, loss=0.05, lease_s=LEASE_S)
        for n in range(2)
    ]
    assert reports[0]["problems"] == []
    assert reports[0]["trace"] == reports[1]["trace"]
    assert reports[0]["names"] > 50
    wire, costs = reports[0]["wire"], reports[0]["costs"]
    assert wire["lost"] > 0 and wire["streamed_bytes"] > 0
    for kind in ("join", "leave", "lose", "return", "join later", "read", "store", "hear 1"):
        assert costs[kind]["count"] > 0
    assert costs["renew"]["questions"] == costs["renew"]["count"]


def test_the_script_prints_its_report(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "simulate_cluster.py"
    command = [sys.executable, script, "--nodes", "3", "--steps", "1", "--lease", "3", "--json"]
    done = subprocess.run(
        [*command, "--directory", tmp_path], capture_output=True, text=True, timeout=100, check=True
    )
    [report] = json.loads(done.stdout)
    assert (report["nodes"], report["problems"]) == (3, [])
    assert report["memory"]["end_cache_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


# What it would find -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


def problems_of(
    directory: Path, server: RedisServer, course: Callable[[Simulation], Awaitable[None]]
) -> list[str]:
    """What a cluster with a fault in it shows."""
    simulation = Simulation(directory, server.url, nodes=NODES, seed=1, loss=0.0, lease_s=LEASE_S)

    async def run() -> None:
        await simulation.run(0)
        await course(simulation)

    try:
        trio.run(run)
    finally:
        simulation.close()
    return simulation.problems


def test_a_node_that_keeps_an_old_list_of_members_is_found(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def course(simulation: Simulation) -> None:
        await simulation.step()
        monkeypatch.setattr("kvfs.cluster.membership.Membership._take", lambda *_: None)
        await simulation.step()

    problems = problems_of(tmp_path, server, course)
    assert any("must know has gone" in problem for problem in problems)


def test_nodes_that_do_not_agree_who_is_there_are_found(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def course(simulation: Simulation) -> None:
        stale = simulation.present[0]
        monkeypatch.setattr(stale.membership, "_take", lambda *_: None)
        await simulation.step()

    problems = problems_of(tmp_path, server, course)
    assert [problem.split(" nodes ")[0] for problem in problems] == ["node 0 misses 1"]


def test_a_copy_without_bytes_is_found(tmp_path: Path, server: RedisServer) -> None:
    async def course(simulation: Simulation) -> None:
        await simulation.step()
        holder = next(node for node in simulation.present if node.disk)
        holder.disk.popitem()
        await simulation.check()

    problems = problems_of(tmp_path, server, course)
    assert any("1 copies are recorded that it has not" in problem for problem in problems)


def test_a_node_that_does_not_hear_what_others_do_is_found(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def course(simulation: Simulation) -> None:
        monkeypatch.setattr("kvfs.meta.redis.RedisEngine._hear", lambda *_: None)
        await simulation.step()

    problems = problems_of(tmp_path, server, course)
    assert any("is cached as it was" in problem for problem in problems)


def test_wrong_bytes_and_holders_that_give_none_are_found(
    tmp_path: Path, server: RedisServer
) -> None:
    async def course(simulation: Simulation) -> None:
        await simulation.step()
        for node in simulation.present:
            node.disk.update(dict.fromkeys(node.disk, b"other bytes"))
        await simulation.check()

    problems = problems_of(tmp_path, server, course)
    assert any("has wrong bytes" in problem for problem in problems)
    assert any("which others have" in problem for problem in problems)
