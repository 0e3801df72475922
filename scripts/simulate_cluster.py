#!/usr/bin/env python3
"""A cluster of a thousand nodes in one process: what its logic promises, and what it costs.

usage: simulate_cluster.py [--nodes 10 100 1000] [--steps 5] [--seed 1] [--loss 0.01] [--lease S]
                           [--directory DIR] [--json]

Each node is production's engine, lease, knowledge of who has what and desk for peers, on one real
metadata server; only files and the network between nodes are simulated (`simulated_node`). In each
step some nodes leave and some are lost without a word, others work before anybody knows; when the
leases of the lost have ended, some that were away come back with their files, and new ones join;
then nodes chosen by chance store, read, evict and remove, and all hear of it and renew their leases
in turn. Messages between nodes get lost.

After each step: every name leads to its file on every node that is asked, and its bytes come where
a node that is there has them; all agree who is there; the server's records of copies are what nodes
have; what nodes have cached is what the server has. At any time: nobody is asked who had left, or
whose lease had ended, when the asking node last renewed its own.

Prints, for each number of nodes, what the operations cost, and the memory of a node; exit code 1
with what broke. The same seed does the same. Leases run by the server's real clock, so they are
longer for more nodes; the lost are waited for.
"""

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

import trio

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.redis_rig import redis_server  # noqa: E402
from scripts.simulation import Simulation  # noqa: E402

_IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
_LEASE_OF_A_NODE_S = 0.06  # so that a turn of all on a busy machine ends in time
_LEASE_S_MIN = 10.0


def simulate(
    directory: Path, *, nodes: int, steps: int, seed: int, loss: float, lease_s: float | None = None
) -> dict[str, Any]:
    """One cluster, from the first node that joins; its report."""
    lease_s = lease_s or max(_LEASE_S_MIN, nodes * _LEASE_OF_A_NODE_S)
    with redis_server(directory / "redis") as server:
        simulation = Simulation(
            directory, server.url, nodes=nodes, seed=seed, loss=loss, lease_s=lease_s
        )
        try:
            trio.run(simulation.run, steps)
        finally:
            simulation.close()
    return simulation.report()


def show(report: dict[str, Any]) -> None:
    """The table of one cluster, each number for one operation."""
    print(f"\n{report['nodes']} nodes, seed {report['seed']}, {report['names']} names at the end")
    print(
        f"{'operation':22}{'count':>7}{'asked':>7}{'B to':>8}{'B from':>9}{'server us':>11}"
        f"{'scripts us':>12}{'node us':>9}{'peer msg':>10}{'peer B':>8}"
    )
    for kind, cost in report["costs"].items():
        of = {name: value / max(1, cost["count"]) for name, value in cost.items()}
        print(
            f"{kind:22}{cost['count']:7}{of['questions']:7.1f}{of['to_server_bytes']:8.0f}"
            f"{of['from_server_bytes']:9.0f}{of['server_us']:11.0f}{of['script_us']:12.0f}"
            f"{of['node_us']:9.0f}{of['peer_messages']:10.1f}{of['peer_bytes']:8.0f}"
        )
    kb = {name: value / 1000 for name, value in report["memory"].items()}
    for when in ("joined", "end"):
        print(
            f"kB a node, {when}: {kb[f'{when}_anonymous_bytes']:.0f} of its own"
            f" (cached records {kb[f'{when}_cache_bytes']:.0f}, members"
            f" {kb[f'{when}_members_bytes']:.0f}), {kb[f'{when}_mapped_bytes']:.0f} mapped"
        )
    for problem in report["problems"]:
        print(f"BROKEN: {problem}")


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loss", type=float, default=0.01, help="of messages between nodes")
    parser.add_argument("--lease", type=float, help="seconds; default: longer for more nodes")
    parser.add_argument("--directory", type=Path, default=_IN_MEMORY, help="for the nodes' tables")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # four for each node
    reports = []
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="kvfs-nodes-", dir=options.directory) as base:
            reports.append(
                simulate(
                    Path(base),
                    nodes=nodes,
                    steps=options.steps,
                    seed=options.seed,
                    loss=options.loss,
                    lease_s=options.lease,
                )
            )
        if not options.json:
            show(reports[-1])
    if options.json:
        print(json.dumps(reports, indent=1))
    sys.exit(1 if any(report["problems"] for report in reports) else 0)


if __name__ == "__main__":
    main()
