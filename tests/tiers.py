"""Tiers for tests: opened over a directory, a bucket or a peer."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfs.settings.words import TierConfig, TierKind, TierLimits
from kvfs.tiers.contract import WritableTier
from kvfs.tiers.directory import DirectoryTier
from kvfs.tiers.opening import open_tier
from scripts.s3_rig import BUCKET

NODE_ID = "node-of-tests"
LIMITS = TierLimits(reads_max=4, writes_max=2, read_deadline_s=20.0, write_deadline_s=20.0)


@contextmanager
def on_tmpfs() -> Iterator[Path]:
    """A directory in memory, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvfs-tier-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def open_directory(
    path: Path,
    kind: TierKind,
    *,
    node_id: str = NODE_ID,
    limits: TierLimits = LIMITS,
    **words: object,
) -> DirectoryTier:
    config = TierConfig(f"a-{kind}", kind, limits, path=path, **words)  # type: ignore[arg-type]
    tier = open_tier(config, node_id)
    assert isinstance(tier, DirectoryTier)
    return tier


def open_bucket(url: str, endpoint: str = "", limits: TierLimits = LIMITS) -> WritableTier:
    config = TierConfig("a-bucket", TierKind.OBJECT, limits, url=url, endpoint=endpoint)
    return open_tier(config, NODE_ID)


def open_s3(port: int, prefix: str, limits: TierLimits = LIMITS) -> WritableTier:
    """A tier in the rig's bucket; a prefix for each test keeps them apart."""
    return open_bucket(f"s3://{BUCKET}/{prefix}", f"http://127.0.0.1:{port}", limits)


def staged(root: Path) -> list[str]:
    """What a tier's directory has that is not put yet."""
    return os.listdir(root / "staging")


def path_of(root: Path, digest: bytes) -> Path:
    """Where a tier's directory has a blob."""
    name = digest.hex()
    return root / "blobs" / name[:2] / name[2:4] / name
