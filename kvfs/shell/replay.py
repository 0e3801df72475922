"""`kvfs replay`: the requests of a trace against a set of tiers, simulated or real."""

import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvfs.config import CHUNK_BYTES_MAX, PAGE_BYTES
from kvfs.errors import InvalidInput
from kvfs.home import CONFIG_NAME, default_store
from kvfs.names import escape
from kvfs.replay import real
from kvfs.replay.plan import Planned, plan
from kvfs.replay.report import Loads, Report, load_times, report_of
from kvfs.replay.simulated import TierSpeed, parse_speeds, simulate
from kvfs.replay.trace import lines_of, read_trace
from kvfs.settings.load import load_config, load_config_of_store
from kvfs.settings.sizes import parse_size
from kvfs.settings.words import TierConfig
from kvfs.shell.progress import ShowProgress
from kvfs.shell.render import duration_text, facts, size_text, table, write_json
from kvfs.tiers.contract import WritableTier
from kvfs.tiers.opening import open_tier


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a person asked for, as words."""

    trace: Path
    simulated: Sequence[str]
    config: Path | None
    capacities: Sequence[str]
    block_bytes: str | int
    speed: float
    limit: int | None
    is_prepared: bool  # blocks that are missing are put first
    is_removed: bool  # blocks are taken out at the end


def replay(wishes: Wishes, out: IO[str], show_progress: ShowProgress, *, is_json: bool) -> int:
    """Run it and print; 1 when blocks were lost. Raises `InvalidInput` and `TierTrouble`."""
    block_bytes = parse_size(wishes.block_bytes, "--block-bytes")
    if block_bytes < PAGE_BYTES:
        raise InvalidInput("--block-bytes", f"{block_bytes} is less than {PAGE_BYTES}")
    if block_bytes > CHUNK_BYTES_MAX:
        raise InvalidInput(
            "--block-bytes", f"{size_text(block_bytes)} is more than {size_text(CHUNK_BYTES_MAX)}"
        )
    if wishes.limit == 0:
        raise InvalidInput("--limit", "0 requests say nothing; write 1 or more, or leave it out")
    if wishes.simulated:
        report = _simulated(wishes, block_bytes, show_progress)
    else:
        report = _real(wishes, block_bytes, show_progress)
    if is_json:
        write_json(out, report.document())
    else:
        for line in _lines(report):
            out.write(line + "\n")
    return 1 if report.loads.lost_blocks else 0


def _simulated(wishes: Wishes, block_bytes: int, show_progress: ShowProgress) -> Report:
    if wishes.config is not None or wishes.is_prepared or wishes.is_removed:
        raise InvalidInput(
            "--simulate", "has no real tiers; leave out --config, --prepare and --remove"
        )
    tiers: list[TierSpeed] = parse_speeds(wishes.simulated)
    planned = _plan(wishes, [tier.name for tier in tiers], block_bytes)
    with show_progress("simulating") as progress:
        progress.set_total(_hit_bytes(planned, block_bytes))
        loads = simulate(
            planned,
            tiers,
            block_bytes,
            speed=wishes.speed,
            on_loaded=lambda blocks: progress.advance(blocks * block_bytes),
        )
    return report_of(planned, block_bytes, loads)


def _real(wishes: Wishes, block_bytes: int, show_progress: ShowProgress) -> Report:
    configs = _configured(wishes.config)
    planned = _plan(wishes, [config.name for config in configs], block_bytes)
    blocks = real.Blocks(block_bytes)
    digests = blocks.digests(planned)
    with ExitStack() as stack:
        node_id = secrets.token_hex(16)
        tiers: list[WritableTier] = []
        for config in configs:
            tiers.append(open_tier(config, node_id))
            stack.callback(tiers[-1].close)
        missing = real.find_missing(planned, digests, tiers)
        count = sum(len(one.blocks) for one in missing)
        if count and not wishes.is_prepared:
            first = next(one for one in missing if one.blocks)
            raise InvalidInput(
                f"tier {first.tier.name}",
                f"lacks {len(first.blocks):,} of {first.wanted:,} blocks of this trace; put them"
                " there with --prepare",
            )
        if wishes.is_removed:  # also when there is no room for all
            stack.callback(real.remove, digests, tiers)
        with show_progress("preparing") as progress:
            progress.set_total(count * block_bytes)
            real.prepare(missing, digests, blocks, lambda n: progress.advance(n * block_bytes))
        with show_progress("replaying") as progress:
            progress.set_total(_hit_bytes(planned, block_bytes))
            loads: Loads = real.Replay(tiers, digests, block_bytes).run(
                planned,
                speed=wishes.speed,
                on_loaded=lambda n: progress.advance(n * block_bytes),
            )
    return report_of(planned, block_bytes, loads)


def _configured(file: Path | None) -> Sequence[TierConfig]:
    config = load_config_of_store() if file is None else load_config(file)
    if not config.tiers:
        where = default_store() / CONFIG_NAME if file is None else file
        raise InvalidInput(
            str(where), "has no [[tiers]]; name a file that has, or use --simulate NAME:GB_PER_S"
        )
    return config.tiers


def _plan(wishes: Wishes, names: Sequence[str], block_bytes: int) -> list[Planned]:
    capacities = _parse_capacities(wishes.capacities, names, block_bytes)
    with open(wishes.trace, "rb") as file:
        name = escape(os.fsencode(wishes.trace))
        requests = read_trace(name, lines_of(file), wishes.limit)
        blocks = [None if size is None else size // block_bytes for size in capacities]
        return list(plan(requests, blocks))


def _parse_capacities(
    words: Sequence[str], names: Sequence[str], block_bytes: int
) -> list[int | None]:
    """Bytes of each tier; None: without limit."""
    found: dict[str, int] = {}
    for word in words:
        name, _, size = word.partition(":")
        if name not in names:
            raise InvalidInput("--capacity", f"{name!r:.80} is no tier; there are {_listed(names)}")
        if name in found:
            raise InvalidInput("--capacity", f"{name} is there twice; say it once")
        found[name] = parse_size(size, f"--capacity {name}")
        if found[name] < block_bytes:
            raise InvalidInput(
                f"--capacity {name}",
                f"{size} holds not one block of {size_text(block_bytes)}; write for example"
                f" {name}:64GiB, or leave this out: then it has no limit",
            )
    return [found.get(name) for name in names]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _hit_bytes(planned: Sequence[Planned], block_bytes: int) -> int:
    return sum(len(one.hits) for one in planned) * block_bytes


def _lines(report: Report) -> list[str]:
    loads = report.loads
    times = load_times(loads.took_s)
    shown = [f"{name} {_time(seconds)}" for name, seconds in times.items()]
    pairs = [
        ("requests", f"{report.requests:,}, {len(loads.took_s):,} with hits"),
        ("blocks", f"{report.blocks:,}, {report.hit_ratio:.1%} hit"),
        ("read", f"{size_text(report.hit_bytes)} in {duration_text(loads.ended_s)}"),
        ("time to load", ", ".join(shown)),
    ]
    if loads.lost_blocks:
        pairs.append(("lost", f"{loads.lost_blocks:,} blocks, which no tier could give"))
    given = sum(tier.read_bytes for tier in loads.tiers) or 1
    rows = [("TIER", "READ", "SHARE", "HEDGES WON", "LOST")]
    rows += [
        (
            tier.name,
            size_text(tier.read_bytes),
            f"{tier.read_bytes / given:.1%}",
            f"{tier.hedges_won:,}",
            f"{tier.hedges_lost:,}",
        )
        for tier in loads.tiers
    ]
    return [*facts(pairs), "", *table(rows, right=range(1, 5))]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration_text(seconds)
