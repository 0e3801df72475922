"""Real vLLM on two nodes of a cluster: what one computed the other loads."""

import os
from pathlib import Path

import pytest

from scripts.cluster_rig import cluster
from tests.engines import StartEngine, prompt_of

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse"),
]

CHUNKS = 4
PROMPT = prompt_of(CHUNKS * 256 + 1, 77)


def test_an_engine_hits_what_an_engine_on_another_node_computed(
    tmp_path: Path, start_engine: StartEngine
) -> None:
    with cluster(2, tmp_path) as rig:
        a, b = rig.nodes
        first = start_engine(a.store)
        cold = first.ask_one(PROMPT, 8)
        first.settle()
        first.stop()
        second = start_engine(b.store)
        warm = second.ask_one(PROMPT, 8)
        second.stop()
        assert (cold.cached, warm.cached) == (0, CHUNKS * 256)
        assert warm.tokens == cold.tokens
