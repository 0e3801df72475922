"""The faults that `fault_cluster.py` brings about in a cluster, and how each is put right."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfs.client import Client
from kvfs.peers.keys import PAIR_NAME, load_pair
from scripts.cluster_rig import ROOT, Node, Rig, command_in

DISK_BYTES = 192 * 1024 * 1024  # of the node whose disk is filled
CLOCK_S = 3600
_FILL_STEP_BYTES = 1024 * 1024
_FUZZ_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `victims` are the nodes that suffer it themselves; of the others nothing is
    excused. `cut_off` are the nodes that may show what was there before."""

    name: str
    hold_s: float
    begin: Callable[[], None]
    heal: Callable[[], None]
    victims: frozenset[int] = frozenset()
    cut_off: frozenset[int] = frozenset()
    halts_victims: bool = False  # their own mounts can't answer
    since: str = "healed"  # from when on recovery is counted


def all_faults(rig: Rig, seconds: float, seed: int, ending: ExitStack) -> list[Fault]:
    """Each kind of fault, held for `seconds`, a partition for six times as long. The last node is
    the one with the small disk. `ending` ends what a fault has started."""
    nodes, server = rig.nodes, rig.server
    last = len(nodes) - 1
    everyone = frozenset(range(len(nodes)))
    second, third = frozenset([1]), frozenset([2])

    def restart_server(*, is_empty: bool) -> None:
        if is_empty:
            server.wipe()
        server.start()

    return [
        Fault("none", seconds, _do_nothing, _do_nothing),
        Fault(
            "kill", seconds, nodes[1].kill, nodes[1].start, second, second,
            since="started again",
        ),
        Fault(
            "stop", seconds, partial(_signal, nodes[2], signal.SIGSTOP),
            partial(_signal, nodes[2], signal.SIGCONT), third, halts_victims=True,
        ),
        Fault(
            "cable", seconds, partial(nodes[1].host.set_up, False),
            partial(nodes[1].host.set_up, True), second, second,
        ),
        Fault(
            "partition", 6 * seconds, partial(nodes[2].host.set_joined, False),
            partial(nodes[2].host.set_joined, True), third, third,
        ),
        Fault(
            "server-kill", seconds, server.kill, partial(restart_server, is_empty=False),
            everyone, everyone,
        ),
        Fault(
            "server-empty", seconds, server.kill, partial(restart_server, is_empty=True),
            everyone, everyone,
        ),
        Fault(
            "server-stop", seconds, partial(_signal_server, rig, signal.SIGSTOP),
            partial(_signal_server, rig, signal.SIGCONT), everyone, everyone,
        ),
        Fault(
            "full", seconds, partial(_fill, nodes[last]), partial(_empty, nodes[last]),
            frozenset([last]),
        ),
        Fault(
            "clock", seconds, partial(_set_clocks, nodes[1], nodes[2], CLOCK_S),
            partial(_set_clocks, nodes[1], nodes[2], 0), second | third, second | third,
            since="set right",
        ),
        _fuzz(nodes[0], nodes[1], seconds, seed, ending),
    ]  # fmt: skip


def _do_nothing() -> None:
    """To see what the load alone costs on this machine."""


def _signal(node: Node, number: signal.Signals) -> None:
    assert node.process is not None
    node.process.send_signal(number)


def _signal_server(rig: Rig, number: signal.Signals) -> None:
    os.kill(rig.server.pid, number)


def _set_clocks(ahead: Node, behind: Node, seconds: int) -> None:
    """Start two nodes again, one with its clock ahead and the other behind."""
    for node, shift_s in ((ahead, seconds), (behind, -seconds)):
        node.stop()
        node.ahead_s = shift_s
        node.start()


# A full disk --------------------------------------------------------------------------------------
@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of its own for a node's store, for the length of a `with` block."""
    directory.mkdir(parents=True)
    options = f"size={DISK_BYTES},mode=700"
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "kvfs-faults", os.fspath(directory)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", os.fspath(directory)], check=True)


def _fill(node: Node) -> None:
    """Take all the room that the disk of a node's store has."""
    with open(node.store / "filler", "wb", buffering=0) as file:
        step = bytes(_FILL_STEP_BYTES)
        while step:
            try:
                file.write(step)
            except OSError:
                step = step[: len(step) // 2]  # to the last byte


def _empty(node: Node) -> None:
    (node.store / "filler").unlink()


# A member that has turned bad ---------------------------------------------------------------------
def _fuzz(target: Node, bad: Node, seconds: float, seed: int, ending: ExitStack) -> Fault:
    """Frames with the key of the second node, thrown at the first from where the second is."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        with Client(target.store) as client:
            shown = client.status()["cluster"]
        [me] = [node for node in shown["nodes"] if node["is_this"]]
        public_key = load_pair(target.store / PAIR_NAME).public
        [digest] = _any_digest(target.store)
        command = [
            *command_in(bad.host), sys.executable, "scripts/fuzz_peers.py",
            "--at", me["address"], "--key", os.fspath(bad.store / PAIR_NAME),
            "--server-key", public_key, "--cluster", shown["name"], "--digest", digest,
            "--seconds", str(seconds), "--seed", str(seed),
        ]  # fmt: skip
        with open(target.directory / "fuzz", "wb") as said:
            process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
        ending.callback(process.kill)
        processes.append(process)

    def heal() -> None:
        code = processes.pop().wait(_FUZZ_END_S)
        said = (target.directory / "fuzz").read_text(errors="replace")
        if code:
            raise RuntimeError(f"the fuzzer says: {said[-2000:]}")

    return Fault("fuzz", seconds, begin, heal, frozenset([1]))


def _any_digest(store: Path) -> list[str]:
    """The digest of a file that a node has."""
    return [path.name for path in (store / "blobs").glob("??/??/*")][:1]
