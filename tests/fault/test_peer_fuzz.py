"""Mutated messages, a few thousand of them: `scripts/fuzz_peers.py` throws more."""

import pytest

from scripts.fuzz_peers import fuzz


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_messages_break_nothing(seed: int) -> None:
    report = fuzz(frames=4000, live_share=0.25, seed=seed)
    assert report.problems == []
    assert report.frames == 4000 and report.live > 500
    assert report.accepted > 0 and report.refused > 1000
    assert report.honest_reads > 2 and report.answered > 0
