#!/usr/bin/env python3
"""One fault after another in a cluster that is written and read all the while.

usage: fault_cluster.py [--faults kill,stop,...] [--nodes 5] [--seconds 10] [--seed 1] [--json]
                        [--directory DIR]

Every node writes files that tell whether they are whole and reads those of all others
(`fault_load`); a process for each node calls statfs, ls, stat and open (of a file that it has)
all the time (`fault_probe`). Each fault (`fault_kinds`) is held for `--seconds`, a partition six
times as long, and then put right. What must hold:

- No read shows a wrong byte, or on a node that is not cut off a version older than the last closed.
- What was closed, and whose bytes a node that is there has, is read on all nodes in the end.
- statfs, ls and the open of a file that a node has take less than 2 s, during the fault and after,
  but in the mount of a process that is itself stopped.
- In the end all is read and written everywhere again.

A line for each fault says how long calls took at most, which errors readers met, how long it took
until the other nodes were served while the fault lasted ("others"), and until all nodes were after
it had been put right ("recovery"). Exit code 1 when one of these did not hold.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.cluster_rig import Rig, cluster  # noqa: E402  (path first)
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.fault_kinds import Fault, all_faults, small_disk  # noqa: E402
from scripts.fault_load import DIRECTORY, Ledger, Load, Tally, write  # noqa: E402
from scripts.fault_probe import Probe  # noqa: E402

NAMES = ("none", "kill", "stop", "cable", "partition", "server-kill", "server-empty", "server-stop",
         "full", "clock", "fuzz")  # fmt: skip
PROMISED = ("statfs", "ls", "open")
PROMISED_S = 2.0
WARM_UP_S = 5.0
CALM_S = 3.0
RECOVERY_DEADLINE_S = 60.0
_AGAIN_S = 0.02


@dataclass(slots=True)
class Report:
    """What one fault did."""

    fault: str
    since: str  # from when on recovery is counted
    held_s: float
    wrong: int
    stale: int
    lost: int  # closed, held by a node, and not read everywhere in the end
    longest_s: dict[str, float]  # of a call, during the fault and until recovery
    after_s: dict[str, float]  # of a call, once all was well again
    read_s: float
    write_s: float
    errors: dict[str, int]  # of readers on nodes that did not suffer the fault themselves
    victims_errors: dict[str, int]
    write_errors: dict[str, int]
    others_s: float | None  # None: they were not all served while it lasted
    recovery_s: float | None
    reads: int
    reopened: int  # of these, after ESTALE: overwritten in place twice while they were opened
    problems: list[str] = field(default_factory=list)


class Check(threading.Thread):
    """Reads names on one node until each was right once, and writes until that works."""

    def __init__(self, ledger: Ledger, node: int, names: Iterable[str], end_s: float) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.left = set(names)
        self.done_s: float | None = None  # when all was right
        self._ledger = ledger
        self._end_s = end_s
        self.start()

    def run(self) -> None:
        can_write = False
        while time.monotonic() < self._end_s:
            self.left = {n for n in self.left if not self._ledger.read(self.node, n)}
            can_write = can_write or self._write()
            if not self.left and can_write:
                self.done_s = time.monotonic()
                return
            time.sleep(_AGAIN_S)

    def _write(self) -> bool:
        try:
            write(self._ledger.path(self.node, f"check-{self.node}"), b"check", is_renamed=True)
        except OSError:
            return False
        return True


class Faults:
    """A cluster under load, and what faults did to it."""

    def __init__(self, rig: Rig, ledger: Ledger, probes: Sequence[Probe], calm_s: float) -> None:
        """`calm_s`: how long after each fault nothing may fail."""
        self._ledger = ledger
        self._probes = probes
        self._nodes = range(len(rig.nodes))
        self._calm_s = calm_s
        self._phase = 0

    def suffer(self, fault: Fault) -> Report:
        """Bring one fault about, put it right, and see that all is well again."""
        self._ledger.next_tally()
        wrong_before = len(self._ledger.wrong)
        self._ledger.cut_off = fault.cut_off
        during = self._enter_phase()
        began_s = time.monotonic()
        fault.begin()
        others = [node for node in self._nodes if node not in fault.victims]
        held_until_s = began_s + fault.hold_s
        checks = self._check(others, self._ledger.held(others), held_until_s)
        others_done_s = _wait(checks, held_until_s)
        time.sleep(max(0.0, held_until_s - time.monotonic()))
        answering = others if fault.halts_victims else self._nodes
        longest = self._longest(during, answering)
        after = self._enter_phase()
        healed_s = time.monotonic()
        fault.heal()
        if fault.since != "healed":
            healed_s = time.monotonic() if fault.since == "set right" else healed_s
        end_s = time.monotonic() + RECOVERY_DEADLINE_S
        checks = self._check(self._nodes, self._ledger.held(self._nodes), end_s)
        done_s = _wait(checks, end_s)
        longest = _most(longest, self._longest(after, answering))
        tally = self._ledger.next_tally()
        left = set[str]().union(*(check.left for check in checks))
        lost = left & set(self._ledger.held(self._nodes))
        self._ledger.cut_off = frozenset()
        calm = self._enter_phase()
        time.sleep(self._calm_s)
        report = Report(
            fault.name, fault.since, round(healed_s - began_s, 1),
            len(self._ledger.wrong) - wrong_before, tally.stale, len(lost), longest,
            self._longest(calm, self._nodes), _longest_of(tally.read_s_max, answering),
            _longest_of(tally.write_s_max, answering), _errors(tally.read_errors, others),
            _errors(tally.read_errors, fault.victims), _errors(tally.write_errors, self._nodes),
            _since(others_done_s, began_s), _since(done_s, healed_s), tally.reads,
            tally.reopened,
        )  # fmt: skip
        report.problems += self._problems(report, self._ledger.next_tally(), wrong_before, lost)
        return report

    def _enter_phase(self) -> int:
        self._phase += 1
        for probe in self._probes:
            probe.enter(self._phase)
        return self._phase

    def _check(self, nodes: Iterable[int], names: Sequence[str], end_s: float) -> list[Check]:
        return [Check(self._ledger, node, names, end_s) for node in nodes]

    def _longest(self, phase: int, nodes: Iterable[int]) -> dict[str, float]:
        longest: dict[str, float] = {}
        for node in nodes:
            longest = _most(longest, self._probes[node].longest_s(phase))
        return longest

    def _problems(
        self, report: Report, calm: Tally, wrong_before: int, lost: set[str]
    ) -> list[str]:
        found = [f"wrong: {line}" for line in self._ledger.wrong[wrong_before:]]
        found += [f"lost: {name}" for name in sorted(lost)]
        for when, longest in (("", report.longest_s), (" after it", report.after_s)):
            found += [
                f"{name} took {longest[name]:.1f} s{when}"
                for name in PROMISED
                if longest.get(name, 0.0) > PROMISED_S
            ]
        if report.recovery_s is None:
            found.append(f"not all was read and written again within {RECOVERY_DEADLINE_S:.0f} s")
        for word, errors in (("read", calm.read_errors), ("written", calm.write_errors)):
            said = _errors(errors, self._nodes)
            if said:
                found.append(f"after recovery not {word}: {said}")
        return found


def _wait(checks: Sequence[Check], end_s: float) -> float | None:
    """When all were served; None when one was not."""
    for check in checks:
        check.join(max(0.0, end_s - time.monotonic()))
    done_s = [check.done_s for check in checks]
    return None if None in done_s else max((s for s in done_s if s is not None), default=None)


def _most(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: round(max(one.get(name, 0.0), other.get(name, 0.0)), 3) for name in one | other}


def _errors(by_node: dict[int, Counter[str]], nodes: Iterable[int]) -> dict[str, int]:
    return dict(sum((by_node.get(node, Counter()) for node in nodes), Counter[str]()))


def _longest_of(by_node: dict[int, float], nodes: Iterable[int]) -> float:
    return round(max((by_node.get(node, 0.0) for node in nodes), default=0.0), 3)


def _since(at_s: float | None, began_s: float) -> float | None:
    return None if at_s is None else round(max(0.0, at_s - began_s), 2)


def run(
    base: Path,
    names: Sequence[str],
    count: int,
    seconds: float,
    seed: int,
    calm_s: float = CALM_S,
) -> list[Report]:
    """So many nodes in `base`, and those faults in turn. Needs root. Prints as it goes."""
    reports = []
    with ExitStack() as stack:
        stack.enter_context(small_disk(base / f"node{count - 1}/store"))
        rig = stack.enter_context(cluster(count, base, keeps=True))
        ledger = Ledger([n.mountpoint for n in rig.nodes], [n.store for n in rig.nodes])
        faults = {fault.name: fault for fault in all_faults(rig, seconds, seed, stack)}
        load = Load(ledger, seed)
        for node in range(count):
            write(ledger.path(node, f"probe-{node}"), b"probe", is_renamed=False)
        probes = []
        for node, one in enumerate(rig.nodes):
            other = f"probe-{(node + 1) % count}"
            probe = Probe(one.mountpoint, DIRECTORY, f"probe-{node}", other)
            stack.callback(probe.stop)
            probes.append(probe)
        with load:
            time.sleep(WARM_UP_S)
            suffering = Faults(rig, ledger, probes, calm_s)
            for name in names:
                reports.append(suffering.suffer(faults[name]))
                print(_line(reports[-1]), file=sys.stderr, flush=True)
        hanging = load.join()
        if hanging:
            reports[-1].problems.append(f"{hanging} calls hang in the end")
    return reports


_HEAD = (
    f"{'fault':13}{'held':>6}{'wrong':>6}{'stale':>6}{'lost':>5}  "
    f"{'statfs':>6} {'ls':>5} {'stat':>5} {'open':>5} {'after':>5} | {'read':>5} {'write':>5} |"
    f" {'others':>7} {'recovery':>8}  reads, errors"
)


def _line(report: Report) -> str:
    calls = " ".join(f"{report.longest_s[n]:5.2f}" for n in ("statfs", "ls", "stat", "open"))
    after = max(report.after_s.values())
    others = "-" if report.others_s is None else f"{report.others_s:.2f}"
    recovery = "never" if report.recovery_s is None else f"{report.recovery_s:.2f}"
    said = [
        f"{who} {errors}"
        for who, errors in (
            ("others", report.errors),
            ("victims", report.victims_errors),
            ("writers", report.write_errors),
        )
        if errors
    ]
    lines = [
        f"{report.fault:13}{report.held_s:6.1f}{report.wrong:6}{report.stale:6}{report.lost:5}  "
        f"{calls:>24} {after:5.2f} | {report.read_s:5.2f} {report.write_s:5.2f} |"
        f" {others:>7} {recovery:>8}  {report.reads}; {'; '.join(said)}"
    ]
    return "\n".join([*lines, *(f"  PROBLEM {problem}" for problem in report.problems[:10])])


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--faults", default=",".join(NAMES), help="which, in this order")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each is held")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, help="where the stores lie; default: in /tmp")
    options = parser.parse_args()
    names = options.faults.split(",")
    unknown = set(names) - set(NAMES)
    if unknown or options.nodes < 3:
        parser.error(f"faults are {', '.join(NAMES)}; and of nodes there must be three")
    print(_HEAD, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="kvfs-faults-", dir=options.directory) as base:
        reports = run(Path(base), names, options.nodes, options.seconds, options.seed)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
    return 1 if any(report.problems for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
