"""What a tier promises, on each kind of tier."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvfs.remote import RemoteReader
from kvfs.settings.words import TierKind
from kvfs.tiers.contract import Tier, WritableTier
from kvfs.tiers.peer import PeerTier, ReferredPeer
from scripts.peer_rig import DirectorySource
from scripts.s3_rig import CREDENTIALS, S3Server
from tests.contract.tier_suite import TierSuite, WritableTierSuite
from tests.peers import asking, serving
from tests.tiers import LIMITS, on_tmpfs, open_bucket, open_directory, open_s3

Spoil = Callable[[bytes, bytes], None]


def spoil_below(root: Path) -> Spoil:
    def spoil(digest: bytes, data: bytes) -> None:
        name = digest.hex()
        (root / "blobs" / name[:2] / name[2:4] / name).write_bytes(data)

    return spoil


class TestMemory(WritableTierSuite):
    kind = TierKind.MEMORY

    @pytest.fixture
    def place(self) -> Iterator[Path]:
        with on_tmpfs() as path:
            yield path

    @pytest.fixture
    def tier(self, place: Path) -> Iterator[WritableTier]:
        tier = open_directory(place, self.kind)
        yield tier
        tier.close()

    @pytest.fixture
    def spoil(self, place: Path) -> Spoil:
        return spoil_below(place)


class TestNvme(WritableTierSuite):
    kind = TierKind.NVME

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[WritableTier]:
        tier = open_directory(tmp_path / "tier", self.kind)
        yield tier
        tier.close()

    @pytest.fixture
    def spoil(self, tier: WritableTier, tmp_path: Path) -> Spoil:
        return spoil_below(tmp_path / "tier")


class TestShared(TestNvme):
    kind = TierKind.SHARED


class TestObjectInDirectory(TestNvme):
    kind = TierKind.OBJECT

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[WritableTier]:
        tier = open_bucket(f"file://{tmp_path}/tier")
        yield tier
        tier.close()


class TestObjectOverS3(WritableTierSuite):
    kind = TierKind.OBJECT

    @pytest.fixture
    def tier(
        self, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[WritableTier]:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        tier = open_s3(s3_server.port, f"{tmp_path.name}/deep")
        yield tier
        tier.close()

    @pytest.fixture
    def spoil(self, s3_server: S3Server, tier: WritableTier, tmp_path: Path) -> Spoil:
        import obstore
        from obstore.store import S3Store

        endpoint = f"http://127.0.0.1:{s3_server.port}"
        url = f"s3://kvfs-test/{tmp_path.name}/deep"
        store = S3Store.from_url(url, endpoint=endpoint, client_options={"allow_http": True})

        def spoil(digest: bytes, data: bytes) -> None:
            name = digest.hex()
            obstore.put(store, f"blobs/{name[:2]}/{name[2:4]}/{name}", data)

        return spoil


class TestPeer(TierSuite):
    kind = TierKind.PEER

    @pytest.fixture
    def source(self, tmp_path: Path) -> DirectorySource:
        os.mkdir(tmp_path / "blobs")
        return DirectorySource(tmp_path / "blobs")

    @pytest.fixture
    def tier(self, source: DirectorySource) -> Iterator[Tier]:
        with serving(source) as server, asking(server.port) as client:
            yield PeerTier("a-peer", LIMITS, client)

    @pytest.fixture
    def add(self, source: DirectorySource) -> Callable[[bytes], bytes]:
        return source.add


class TestPeerByTickets(TestPeer):
    @pytest.fixture
    def tier(self, source: DirectorySource) -> Iterator[Tier]:
        with (
            serving(source) as server,
            asking(server.port) as client,
            closing(RemoteReader()) as reader,
        ):
            yield PeerTier("a-peer", LIMITS, ReferredPeer(client, reader))
