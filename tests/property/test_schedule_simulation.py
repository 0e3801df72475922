"""`scripts/simulate_schedule.py` with few seeds: the pull scheduler comes near to what is possible,
on a virtual clock."""

import pytest

from kvfs.schedule import Chunk, TierTerms
from scripts import simulate_schedule as simulation
from scripts.simulated_tiers import MIB, Load, Reader, SimulatedTier, World

SEEDS = (1, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_steady_tiers_give_nearly_all_that_they_have(seed: int) -> None:
    assert simulation.steady("pull", seed) > 0.95
    assert simulation.steady("first tier", seed) < 0.6


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", simulation.FEW)
def test_jobs_of_few_chunks_come_near_it_from_tiers_that_are_known(count: int, seed: int) -> None:
    assert simulation.few(count, seed, is_known=True) > 0.8


@pytest.mark.parametrize("seed", SEEDS)
def test_tiers_whose_speed_changes_do_as_well(seed: int) -> None:
    reached = simulation.changing("pull", seed)
    assert reached > 0.92
    assert reached > simulation.changing("static split", seed)


@pytest.mark.parametrize("which", range(3))
def test_a_tier_that_freezes_costs_no_more_than_itself(which: int) -> None:
    assert simulation.frozen(which, seed=1) < 1.3


def test_hedges_take_the_tail_away() -> None:
    hedged = simulation.tail(is_hedged=True, seed=1, count=1000)
    unhedged = simulation.tail(is_hedged=False, seed=1, count=1000)
    assert hedged["p99_ms"] < unhedged["p99_ms"] / 2
    assert hedged["read"] < 1.15


def test_short_jobs_of_a_burst_are_not_behind_a_long_one() -> None:
    assert simulation.burst("pull", seed=1) < simulation.burst("static split", seed=1) / 2


def test_the_same_seed_does_the_same() -> None:
    results = [simulation.tail(is_hedged=True, seed=3, count=200) for _ in range(2)]
    assert results[0] == results[1]


def test_a_frozen_tier_comes_back_by_itself() -> None:
    frozen = SimulatedTier(200 * MIB, frozen=(0.5, 4.0))
    world = World([SimulatedTier(50 * MIB), frozen], seed=1)
    reader = Reader(world)
    reader.stuck_s = 1.0
    chunks = tuple(Chunk(4 * MIB, (0, 1)) for _ in range(300))
    result = reader.run([Load(0, chunks)])
    assert result.lost == 0
    share = reader.schedule.view().tiers[1].bytes_read / (300 * 4 * MIB)
    assert share > 0.6  # most came after it was back
    assert result.end_s < 10.0  # 24 s without it


def test_who_costs_is_asked_only_when_others_are_slower_than_its_price() -> None:
    def paid(request_cost_s: float) -> int:
        world = World([SimulatedTier(100 * MIB), SimulatedTier(100 * MIB)], seed=1)
        terms = [TierTerms(), TierTerms(request_cost_s=request_cost_s)]
        reader = Reader(world, terms)
        reader.run([Load(0, tuple(Chunk(4 * MIB, (0, 1)) for _ in range(100)))])
        return reader.schedule.view().tiers[1].reads_ended

    assert paid(0.02) > 20  # a chunk takes 40 ms from the other
    assert paid(0.5) < 10  # as long as nothing is known of the other, whose first reads look late


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pool_of_eight_buffers_is_enough_for_three_tiers(seed: int) -> None:
    world = World(simulation.tiers_of(), seed)
    result = Reader(world, buffers=8).run([Load(0, simulation.chunks_of(300))])
    bandwidth = simulation.BYTES_PER_S * sum(simulation.SHARES)
    assert 300 * simulation.CHUNK_BYTES / bandwidth / result.end_s > 0.95
    assert result.hedges < 15
