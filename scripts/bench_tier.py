#!/usr/bin/env python3
"""Each kind of tier against the bare way to the same bytes.

usage: bench_tier.py [--dir DIR] [--chunks 16] [--mib 16] [--rounds 7] [--threads 1,4] [--json]

For each kind of tier, in turns: all chunks read through the tier, and through the bare way, by as
many threads, each into a page-aligned buffer of its own:
  memory, nvme, shared   against open and `kvfs.file_io.read_into`; nvme and shared lie below DIR,
                         cold (root drops the page cache) and warm
  object                 below DIR (file:), against the same files
  s3                     moto's server on loopback (scripts/setup tiers), against obstore.get_range
  peer                   a server in this process, against `PeerClient.read_into`
Prints MiB/s (medians), the ratio (median of the pairs, smallest and largest), and how long one call
takes for 4 KiB (memory and bare). Everything that it makes is removed.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.config import MIB  # noqa: E402  (path first)
from kvfs.digest import digest_of  # noqa: E402
from kvfs.file_io import allocate, read_into  # noqa: E402
from kvfs.peers.client import PeerClient  # noqa: E402
from kvfs.peers.server import PeerServer  # noqa: E402
from kvfs.settings.words import TIER_LIMITS, TierConfig, TierKind  # noqa: E402  (path first)
from kvfs.tiers.contract import Tier, WritableTier  # noqa: E402
from kvfs.tiers.opening import open_tier  # noqa: E402
from kvfs.tiers.peer import PeerTier  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.memory_rig import drop_page_cache  # noqa: E402
from scripts.peer_rig import CLIENT_ID, CLUSTER, SERVER_ID, DirectorySource  # noqa: E402
from scripts.s3_rig import BUCKET, CREDENTIALS, PYTHON, S3Server  # noqa: E402

Read = Callable[[bytes, memoryview], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two ways to the same bytes."""

    name: str
    tier: Tier
    bare: Read
    is_cold: bool = False

    def through_tier(self, digest: bytes, memory: memoryview) -> None:
        assert self.tier.read_into(digest, 0, memory)


def of_files(root: Path) -> Read:
    def read(digest: bytes, memory: memoryview) -> None:
        name = digest.hex()
        fd = os.open(root / "blobs" / name[:2] / name[2:4] / name, os.O_RDONLY)
        try:
            assert read_into(fd, memory, len(memory)) == len(memory)
        finally:
            os.close(fd)

    return read


def put_all(tier: WritableTier, chunks: dict[bytes, bytes]) -> None:
    for digest, data in chunks.items():
        tier.put(digest, memoryview(data), len(data))


@contextmanager
def pairs_of(directory: Path, memory: Path, chunks: dict[bytes, bytes]) -> Iterator[list[Pair]]:
    """All tiers, filled."""
    pairs: list[Pair] = []
    with ExitStack() as stack:

        def opened(kind: TierKind, root: Path | None, url: str = "", endpoint: str = "") -> Tier:
            limits = TIER_LIMITS[kind]
            config = TierConfig(f"bench-{kind}", kind, limits, root, 0, url=url, endpoint=endpoint)
            tier = open_tier(config, "bench")
            stack.callback(tier.close)
            put_all(tier, chunks)
            return tier

        for kind, root in (
            (TierKind.MEMORY, memory / "tier"),
            (TierKind.NVME, directory / "nvme"),
            (TierKind.SHARED, directory / "shared"),
        ):
            tier = opened(kind, root)
            pairs.append(Pair(kind, tier, of_files(root)))
            if kind is not TierKind.MEMORY and os.geteuid() == 0:
                pairs.append(Pair(f"{kind} cold", tier, of_files(root), is_cold=True))
        tier = opened(TierKind.OBJECT, None, f"file://{directory}/object")
        pairs.append(Pair("object", tier, of_files(directory / "object")))
        if PYTHON.exists():
            pairs.append(_s3_pair(stack, directory, opened))
        pairs.append(_peer_pair(stack, directory, chunks))
        yield pairs


def _s3_pair(stack: ExitStack, directory: Path, opened: Callable[..., Tier]) -> Pair:
    import obstore
    from obstore.store import S3Store

    os.environ.update(CREDENTIALS)
    server = S3Server(directory / "s3.log")
    stack.callback(server.close)
    endpoint = f"http://127.0.0.1:{server.port}"
    store = S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True})

    def read(digest: bytes, memory: memoryview) -> None:
        name = digest.hex()
        path = f"x/blobs/{name[:2]}/{name[2:4]}/{name}"
        memory[:] = memoryview(obstore.get_range(store, path, start=0, length=len(memory)))

    return Pair("s3", opened(TierKind.OBJECT, None, f"s3://{BUCKET}/x", endpoint), read)


def _peer_pair(stack: ExitStack, directory: Path, chunks: dict[bytes, bytes]) -> Pair:
    (directory / "peer").mkdir()
    source = DirectorySource(directory / "peer")
    for data in chunks.values():
        source.add(data)
    server = PeerServer(source, "127.0.0.1:0", SERVER_ID, CLUSTER, None)
    server.start()
    stack.callback(server.close)
    client = PeerClient(f"127.0.0.1:{server.port}", None, None, CLIENT_ID, CLUSTER)
    stack.callback(client.close)

    def read(digest: bytes, memory: memoryview) -> None:
        assert client.read_into(digest, 0, memory, 60.0)

    return Pair("peer", PeerTier("bench-peer", TIER_LIMITS[TierKind.PEER], client), read)


def timed(read: Read, digests: list[bytes], buffers: list[memoryview]) -> float:
    """Seconds for all, with a thread for each buffer."""
    waiting = iter(digests)
    lock = threading.Lock()
    failed: list[BaseException] = []

    def work(buffer: memoryview) -> None:
        try:
            while True:
                with lock:
                    digest = next(waiting, None)
                if digest is None:
                    return
                read(digest, buffer)
        except BaseException as error:  # noqa: BLE001  (raised below)
            failed.append(error)

    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.perf_counter() - begin_s


def measure(pair: Pair, chunks: dict[bytes, bytes], threads: int, rounds: int) -> dict[str, object]:
    size_bytes = len(next(iter(chunks.values())))
    total_mib = len(chunks) * size_bytes / MIB
    buffers = [allocate(size_bytes)[:size_bytes] for _ in range(threads)]
    digests = list(chunks)
    speeds: dict[str, list[float]] = {"tier": [], "bare": []}
    for number in range(rounds + 1):
        order = [("tier", pair.through_tier), ("bare", pair.bare)]
        for name, read in order if number % 2 else order[::-1]:
            if pair.is_cold:
                drop_page_cache()
            took_s = timed(read, digests, buffers)
            if number:  # the first warms up
                speeds[name].append(total_mib / took_s)
    pair.through_tier(digests[0], buffers[0])
    assert digest_of(buffers[0]) == digests[0]
    ratios = [tier / bare for tier, bare in zip(speeds["tier"], speeds["bare"], strict=True)]
    return {
        "tier": pair.name,
        "threads": threads,
        "tier_mib_s": round(statistics.median(speeds["tier"])),
        "bare_mib_s": round(statistics.median(speeds["bare"])),
        "ratio": round(statistics.median(ratios), 2),
        "smallest": round(min(ratios), 2),
        "largest": round(max(ratios), 2),
    }


def call_us(read: Read, digest: bytes, memory: memoryview, count: int = 2000) -> float:
    begin_s = time.perf_counter()
    for _ in range(count):
        read(digest, memory)
    return (time.perf_counter() - begin_s) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1,4")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    clean_up_on_sigterm()
    directory = Path(tempfile.mkdtemp(prefix="bench-tier-", dir=arguments.dir))
    memory = Path(tempfile.mkdtemp(prefix="bench-tier-", dir="/dev/shm"))
    try:
        data = [os.urandom(arguments.mib * MIB) for _ in range(arguments.chunks)]
        chunks = {digest_of(item): item for item in data}
        with pairs_of(directory, memory, chunks) as pairs:
            for threads in map(int, arguments.threads.split(",")):
                for pair in pairs:
                    row = measure(pair, chunks, threads, arguments.rounds)
                    print(json.dumps(row) if arguments.json else _shown(row), flush=True)
            first, small = pairs[0], allocate(4096)[:4096]
            digest = next(iter(chunks))
            for name, read in (("tier", first.through_tier), ("bare", first.bare)):
                print(f"4 KiB from memory, {name}: {call_us(read, digest, small):.0f} us a call")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def _shown(row: dict[str, object]) -> str:
    return (
        f"{row['tier']:<12} {row['threads']} threads  tier {row['tier_mib_s']:>6} MiB/s"
        f"  bare {row['bare_mib_s']:>6} MiB/s  ratio {row['ratio']}"
        f" ({row['smallest']} to {row['largest']})"
    )


if __name__ == "__main__":
    main()
