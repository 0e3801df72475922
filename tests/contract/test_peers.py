"""What a peer promises, on each of the ways on which its bytes may travel."""

import array
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvfs.config import MIB, PEER_BATCH_ITEMS_MAX, PEER_READ_BYTES_MAX, PeerLimits
from kvfs.errors import InvalidInput, Unavailable
from kvfs.peers.client import PeerClient
from kvfs.peers.keys import Keys, load_pair
from kvfs.peers.server import PeerServer
from scripts.peer_rig import CLIENT_ID, CLUSTER, SERVER_ID, DirectorySource
from tests.peers import (
    DEADLINE_S,
    QUICK,
    asking,
    is_settled,
    kernel_threads,
    make_keys,
    open_descriptors,
    peer_threads,
    read_whole,
    serving,
)
from tests.processes import wait_until

ABSENT = b"a" * 16


@dataclass(frozen=True, slots=True)
class Pair:
    source: DirectorySource
    server: PeerServer
    connect: Callable[[], PeerClient]
    client: PeerClient


@pytest.fixture(params=["plain", "keys", "encrypted"])
def way(request: pytest.FixtureRequest) -> str:
    """Without keys; with keys and plain bulk; with all bytes inside the channel."""
    return str(request.param)


@pytest.fixture
def pair(way: str, tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "blobs").mkdir()
    source = DirectorySource(tmp_path / "blobs")
    server_keys, client_keys = (None, None) if way == "plain" else make_keys(tmp_path)
    with ExitStack() as stack:
        server = stack.enter_context(serving(source, server_keys))

        def connect() -> PeerClient:
            key = server_keys.pair.public if server_keys is not None else None
            return stack.enter_context(
                asking(server.port, client_keys, key, encrypt_bulk=way == "encrypted")
            )

        yield Pair(source, server, connect, connect())


def test_sizes_are_those_of_blobs_that_are_here(pair: Pair) -> None:
    digests = [pair.source.add(os.urandom(size)) for size in (1, 5000, 0)]
    assert pair.client.sizes([*digests, ABSENT], DEADLINE_S) == [1, 5000, 0, None]
    assert pair.client.sizes([], DEADLINE_S) == []


def test_more_digests_than_a_message_holds_are_looked_up(pair: Pair) -> None:
    digest = pair.source.add(b"abc")
    count = 2 * PEER_BATCH_ITEMS_MAX + 1
    sizes = pair.client.sizes([digest, ABSENT] * count, DEADLINE_S)
    assert sizes == [3, None] * count


@pytest.mark.parametrize("size", [1, 4096, PEER_READ_BYTES_MAX, 3 * MIB + 17])
def test_a_blob_arrives_as_it_is(pair: Pair, size: int) -> None:
    data = os.urandom(size)
    digest = pair.source.add(data)
    assert read_whole(pair.client, digest, size) == data
    buffer = memoryview(bytearray(b"x" * (size + 2)))
    assert pair.client.read_into(digest, 0, buffer[1:-1], DEADLINE_S)
    assert bytes(buffer) == b"x" + data + b"x"


def test_a_range_is_what_lies_there(pair: Pair) -> None:
    data = os.urandom(2 * MIB)
    digest = pair.source.add(data)
    for offset, length in ((0, 1), (2 * MIB - 1, 1), (5, 4096), (MIB - 3, MIB)):
        buffer = bytearray(length)
        assert pair.client.read_into(digest, offset, memoryview(buffer), DEADLINE_S)
        assert buffer == data[offset : offset + length]


def test_what_is_not_there_is_a_miss(pair: Pair) -> None:
    digest = pair.source.add(bytes(1000))
    for blob, offset, length in ((ABSENT, 0, 1), (digest, 0, 1001), (digest, 1000, 1)):
        buffer = memoryview(bytearray(length))
        assert not pair.client.read_into(blob, offset, buffer, DEADLINE_S)
    assert read_whole(pair.client, digest, 1000) == bytes(1000)


def test_many_ranges_come_each_into_its_own_buffer(pair: Pair) -> None:
    blobs = [os.urandom(10_000) for _ in range(5)]
    digests = [pair.source.add(blob) for blob in blobs]
    wants, expected = [], []
    for index in range(700):  # more than one batch of tickets
        which, offset = index % 6, index * 13 % 5000
        wants.append(((*digests, ABSENT)[which], offset, memoryview(bytearray(1000))))
        expected.append(blobs[which][offset : offset + 1000] if which < 5 else None)
    filled = pair.client.read_many(wants, DEADLINE_S)
    found = [
        bytes(buffer) if is_here else None
        for is_here, (_, _, buffer) in zip(filled, wants, strict=True)
    ]
    assert found == expected
    assert pair.client.read_many([], DEADLINE_S) == []


def test_buffers_of_any_type_are_filled(pair: Pair) -> None:
    values = array.array("d", [1.5, -2.0, 3e300])
    digest = pair.source.add(values.tobytes())
    into = array.array("d", [0.0] * 3)
    assert pair.client.read_into(digest, 0, memoryview(into), DEADLINE_S)
    assert into == values


@pytest.mark.parametrize(
    "buffer",
    [memoryview(b"abc"), memoryview(bytearray(8))[::2], memoryview(bytearray())],
    ids=["read-only", "with gaps", "empty"],
)
def test_a_buffer_that_cannot_be_filled_is_refused(pair: Pair, buffer: memoryview) -> None:
    with pytest.raises(InvalidInput, match="buffer"):
        pair.client.read_into(ABSENT, 0, buffer, DEADLINE_S)


@pytest.mark.parametrize(("digest", "offset"), [(b"short", 0), (ABSENT, -1), (ABSENT, 2**63)])
def test_a_range_that_no_blob_has_is_refused_before_it_is_sent(
    pair: Pair, digest: bytes, offset: int
) -> None:
    with pytest.raises(InvalidInput):
        pair.client.read_into(digest, offset, memoryview(bytearray(1)), DEADLINE_S)
    assert pair.client.sizes([ABSENT], DEADLINE_S) == [None]


def test_hints_arrive(pair: Pair) -> None:
    pair.client.hint([b"1" * 16, b"2" * 16], DEADLINE_S)
    assert pair.source.hints == [b"1" * 16, b"2" * 16]


def test_health_is_the_sources(pair: Pair) -> None:
    health = pair.client.health(DEADLINE_S)
    assert health.free_bytes > 0 and health.load == 0.0 and health.uptime_s > 0


def test_threads_read_at_the_same_time(pair: Pair) -> None:
    blobs = [os.urandom(MIB + index) for index in range(4)]
    digests = [pair.source.add(blob) for blob in blobs]
    wrong: list[object] = []

    def read(client: PeerClient, first: int) -> None:
        for turn in range(10):
            index = (first + turn) % len(blobs)
            if read_whole(client, digests[index], len(blobs[index])) != blobs[index]:
                wrong.append(index)
            if client.sizes([digests[index]], DEADLINE_S) != [len(blobs[index])]:
                wrong.append(index)

    clients = [pair.client, pair.connect()]
    threads = [threading.Thread(target=read, args=(clients[n % 2], n)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_blob_that_vanishes_is_a_miss(pair: Pair) -> None:
    digest = pair.source.add(b"abc")
    assert pair.client.sizes([digest], DEADLINE_S) == [3]
    (pair.source.directory / digest.hex()).unlink()
    assert read_whole(pair.client, digest, 3) is None


def test_a_closed_client_is_of_no_use(pair: Pair) -> None:
    client = pair.connect()
    assert client.sizes([ABSENT], DEADLINE_S) == [None]
    client.close()
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.sizes([ABSENT], DEADLINE_S)
    assert pair.client.sizes([ABSENT], DEADLINE_S) == [None]


def test_nothing_is_left_of_peers_that_were_closed(way: str, tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(b"abc")
    server_keys, client_keys = (None, None) if way == "plain" else make_keys(tmp_path)
    key = server_keys.pair.public if server_keys is not None else None
    descriptors, threads = open_descriptors(), kernel_threads()
    for _ in range(3):
        with (
            serving(source, server_keys) as server,
            asking(server.port, client_keys, key, encrypt_bulk=way == "encrypted") as client,
            asking(server.port, client_keys, key) as other,
        ):
            assert read_whole(client, digest, 3) == b"abc"
            assert read_whole(other, digest, 3) == b"abc"
            assert peer_threads()
    assert peer_threads() == []
    assert is_settled(open_descriptors, descriptors)
    assert is_settled(kernel_threads, threads)


def test_an_encrypting_server_gives_bytes_inside_the_channel_only(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(b"abc")
    server_keys, client_keys = make_keys(tmp_path)
    key = server_keys.pair.public
    with (
        serving(source, server_keys, encrypt_bulk=True) as server,
        asking(server.port, client_keys, key) as plain,
        asking(server.port, client_keys, key, encrypt_bulk=True) as encrypting,
    ):
        with pytest.raises(Unavailable, match="set encrypt_bulk here too"):
            read_whole(plain, digest, 3)
        assert read_whole(encrypting, digest, 3) == b"abc"
        assert plain.sizes([digest], DEADLINE_S) == [3]


def test_what_was_idle_for_long_is_opened_again(way: str, tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(b"abc")
    server_keys, client_keys = (None, None) if way == "plain" else make_keys(tmp_path)
    key = server_keys.pair.public if server_keys is not None else None
    with (
        serving(source, server_keys, QUICK) as server,
        asking(server.port, client_keys, key, encrypt_bulk=way == "encrypted") as client,
    ):
        assert read_whole(client, digest, 3) == b"abc"
        wait_until(lambda: server.session_count == 0 and server.stream_count == 0)
        assert read_whole(client, digest, 3) == b"abc"


def test_a_server_that_comes_back_is_served_from(way: str, tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(b"abc")
    server_keys, client_keys = (None, None) if way == "plain" else make_keys(tmp_path)
    key = server_keys.pair.public if server_keys is not None else None
    with serving(source, server_keys) as server:
        port = server.port
    with (
        asking(port, client_keys, key, encrypt_bulk=way == "encrypted", limits=QUICK) as client,
        pytest.raises(Unavailable, match="cannot be reached"),
    ):
        client.sizes([digest], DEADLINE_S)
    with asking(port, client_keys, key, encrypt_bulk=way == "encrypted", limits=QUICK) as client:
        for _ in range(2):
            with serving(source, server_keys, port=port):
                wait_until(lambda: _serves(client, digest))
            with pytest.raises(Unavailable):
                client.sizes([digest], DEADLINE_S)


def _serves(client: PeerClient, digest: bytes) -> bool:
    try:
        return read_whole(client, digest, 3) == b"abc"
    except Unavailable:
        return False


# Who may ask --------------------------------------------------------------------------------------
def test_another_cluster_is_not_served(tmp_path: Path) -> None:
    with (
        serving(DirectorySource(tmp_path)) as server,
        asking(server.port, cluster="other") as client,
        pytest.raises(Unavailable, match="is of cluster 'other'; this is 'rig'"),
    ):
        client.sizes([ABSENT], DEADLINE_S)


def test_an_unknown_key_is_not_served(tmp_path: Path) -> None:
    server_keys, client_keys = make_keys(tmp_path)
    stranger = Keys(load_pair(tmp_path / "stranger"))
    source = DirectorySource(tmp_path)
    digest = source.add(b"abc")
    with (
        serving(source, server_keys) as server,
        asking(server.port, client_keys, server_keys.pair.public) as client,
        asking(server.port, stranger, server_keys.pair.public) as other,
    ):
        with pytest.raises(Unavailable, match="does not know this node's key"):
            other.sizes([digest], DEADLINE_S)
        assert read_whole(client, digest, 3) == b"abc"


def test_a_server_with_another_key_is_not_believed(tmp_path: Path) -> None:
    server_keys, client_keys = make_keys(tmp_path)
    with (
        serving(DirectorySource(tmp_path), server_keys) as server,
        asking(server.port, client_keys, client_keys.pair.public, limits=QUICK) as client,
        pytest.raises(Unavailable),
    ):
        client.sizes([ABSENT], DEADLINE_S)


@pytest.mark.parametrize("has_keys", [True, False], ids=["server has keys", "client has keys"])
def test_with_keys_and_without_do_not_go_together(tmp_path: Path, has_keys: bool) -> None:
    server_keys, client_keys = make_keys(tmp_path)
    with (
        serving(DirectorySource(tmp_path), server_keys if has_keys else None) as server,
        asking(
            server.port,
            None if has_keys else client_keys,
            None if has_keys else server_keys.pair.public,
            limits=QUICK,
        ) as client,
        pytest.raises(Unavailable),
    ):
        client.sizes([ABSENT], DEADLINE_S)


def test_a_server_without_keys_keeps_to_loopback(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    with pytest.raises(InvalidInput, match="insecure=True"):
        PeerServer(source, "0.0.0.0:0", SERVER_ID, CLUSTER, None)
    server = PeerServer(source, "0.0.0.0:0", SERVER_ID, CLUSTER, None, insecure=True)
    server.start()
    try:
        with asking(server.port) as client:
            assert client.sizes([ABSENT], DEADLINE_S) == [None]
    finally:
        server.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="the kernel has no IPv6")
def test_an_address_of_version_six_serves_as_well(way: str, tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(b"abc")
    server_keys, client_keys = (None, None) if way == "plain" else make_keys(tmp_path)
    server = PeerServer(source, "[::1]:0", SERVER_ID, CLUSTER, server_keys)
    server.start()
    try:
        client = PeerClient(
            f"[::1]:{server.port}",
            client_keys,
            server_keys.pair.public if server_keys is not None else None,
            CLIENT_ID,
            CLUSTER,
            encrypt_bulk=way == "encrypted",
        )
        assert read_whole(client, digest, 3) == b"abc"
        client.close()
    finally:
        server.close()


def test_a_place_that_is_taken_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    with serving(source) as server:
        descriptors = open_descriptors()
        with pytest.raises(InvalidInput, match="cannot be listened on"):
            PeerServer(source, f"127.0.0.1:{server.port}", SERVER_ID, CLUSTER, None)
        with pytest.raises(InvalidInput, match=r"192.0.2.1:7400: cannot be listened on"):
            PeerServer(source, "192.0.2.1:7400", SERVER_ID, CLUSTER, None, insecure=True)
        with pytest.raises(InvalidInput, match=f"127.0.0.1:{server.port}: .*another bulk_port"):
            PeerServer(source, "127.0.0.1:0", SERVER_ID, CLUSTER, None, bulk_port=server.port)
        assert is_settled(open_descriptors, descriptors)


def test_a_server_that_never_started_is_closed(tmp_path: Path) -> None:
    descriptors = open_descriptors()
    server = PeerServer(DirectorySource(tmp_path), "127.0.0.1:0", SERVER_ID, CLUSTER, None)
    server.close()
    assert is_settled(open_descriptors, descriptors)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"address": "node-1:5"}, "IP address"),
        ({"address": "nonsense"}, "host:port"),
        ({"server_key": "x" * 40}, "or neither"),
        ({"encrypt_bulk": True}, "needs keys"),
        ({"node_id": b"short"}, "16 bytes"),
    ],
)
def test_a_client_that_could_never_ask_is_refused(words: dict[str, object], reason: str) -> None:
    arguments: dict[str, object] = {
        "address": "127.0.0.1:5",
        "keys": None,
        "server_key": None,
        "node_id": CLIENT_ID,
        "cluster": CLUSTER,
        "limits": PeerLimits(),
    }
    with pytest.raises(InvalidInput, match=reason):
        PeerClient(**{**arguments, **words})  # type: ignore[arg-type]  # of any kind, on purpose
