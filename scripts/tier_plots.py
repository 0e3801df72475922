"""Pictures of what scripts/bench_tiers.py measured. Nothing else needs matplotlib."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen
import matplotlib.pyplot as plt

from kvfs.config import MIB
from scripts.tier_contest import PACE_S, Run
from scripts.tier_scenarios import Table

WINDOW_S = 0.5  # over which a speed is taken
SIDES = ("kvfs", "static split", "first in list")


def draw(table: Table, speeds: Sequence[float], directory: Path) -> Iterator[Path]:
    """Draw what there is to draw; the files, as they are there."""
    directory.mkdir(parents=True, exist_ok=True)
    if any((name, "kvfs") in table.rows for name in ("steady", "changing")):
        yield _draw_ratios(table, directory / "ratios.png")
    for name in ("changing", "frozen"):
        run = table.runs.get((name, "kvfs"))
        if run is not None:
            yield _draw_speeds(name, run, speeds, directory / f"{name}.png")
    if table.latencies:
        yield _draw_latencies(table.latencies, directory / "single.png")


def _draw_ratios(table: Table, path: Path) -> Path:
    names = [name for name in ("steady", "changing") if (name, "kvfs") in table.rows]
    figure, axes = plt.subplots(figsize=(7, 4))
    width = 0.8 / len(SIDES)
    for number, side in enumerate(SIDES):
        rows = [table.rows[name, side].figures for name in names]
        middles = [statistics.median(row) for row in rows]
        spread = [
            [middle - min(row) for middle, row in zip(middles, rows, strict=True)],
            [max(row) - middle for middle, row in zip(middles, rows, strict=True)],
        ]
        places = [at + (number - 1) * width for at in range(len(names))]
        axes.bar(places, middles, width, yerr=spread, capsize=3, label=side)
    axes.set_xticks(range(len(names)), names)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_ylabel("of what all tiers can give")
    axes.legend(loc="lower right")
    return _save(figure, path)


def _draw_speeds(name: str, run: Run, speeds: Sequence[float], path: Path) -> Path:
    """What each tier gave over time, one upon the other."""
    figure, axes = plt.subplots(figsize=(7, 4))
    times, given = [], [list[float]() for _ in speeds]
    for (begin_s, before), (end_s, after) in _windows(run):
        times.append((begin_s + end_s) / 2)
        for number, rates in enumerate(given):
            rates.append((after[number] - before[number]) / (end_s - begin_s) / MIB)
    labels = [f"tier {number}, {speed / MIB:.0f} MiB/s" for number, speed in enumerate(speeds)]
    axes.stackplot(times, given, labels=labels)
    could = [rate / MIB for rate in run.could or [sum(speeds), sum(speeds)]]
    step_s = PACE_S if run.could else run.took_s
    axes.step([n * step_s for n in range(len(could))], could, "k:", where="post", label="all could")
    axes.set_xlabel("s since the job began")
    axes.set_ylabel("MiB/s")
    axes.set_title(name)
    axes.legend(loc="lower right")
    return _save(figure, path)


def _windows(
    run: Run,
) -> Iterator[tuple[tuple[float, list[int]], tuple[float, list[int]]]]:
    last = (0.0, [0] * len(run.samples[0][1])) if run.samples else (0.0, [])
    for sample in run.samples:
        if sample[0] - last[0] >= WINDOW_S:
            yield last, sample
            last = sample


def _draw_latencies(latencies: dict[str, list[float]], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(7, 4))
    for side, took_s in latencies.items():
        shares = [1 - number / len(took_s) for number in range(len(took_s))]
        axes.plot([1e3 * value for value in sorted(took_s)], shares, label=side)
    axes.set_yscale("log")
    axes.set_xlabel("ms of one read")
    axes.set_ylabel("share that took longer")
    axes.legend()
    return _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
