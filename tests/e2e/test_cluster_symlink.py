"""Symbolic links to blobs in a cluster."""

import os
import random
from pathlib import Path

import pytest

from kvfs.config import MIB
from scripts.cluster_rig import cluster

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse"),
]


def test_a_link_leads_to_bytes_that_are_here(tmp_path: Path) -> None:
    with cluster(2, tmp_path, "-o", "symlink") as rig:
        a, b = rig.nodes
        content = random.Random(12).randbytes(9 * MIB)
        (a.mountpoint / "linked").write_bytes(content)
        assert (b.mountpoint / "linked").is_symlink()
        target = os.readlink(b.mountpoint / "linked")
        assert len(target) == os.lstat(b.mountpoint / "linked").st_size
        assert Path(target).is_relative_to(b.store)
        assert Path(target).read_bytes() == content
        assert (b.mountpoint / "linked").read_bytes() == content
