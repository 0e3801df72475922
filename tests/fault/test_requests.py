"""Requests that break a rule, sent to a real node: refused in words, and they change nothing."""

import os
import socket
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvfs.client import Client
from kvfs.client_files import StagedFile
from kvfs.config import CLIENTS_MAX, WARM_WINDOW_FILES
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, NamespaceError, Unavailable
from kvfs.wire import PROTOCOL
from tests.files import load_bytes, store_bytes
from tests.processes import wait_until

DIGEST = digest_of(b"abc")
CHUNK = [b"ab-g0-s0", b"", 0, 256, 0, 0, b"12345678"]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("paths_of", [b"", 0, 0, b"", 1]),
        ("paths_of", [DIGEST + b"x", 0, 0, b"", 1]),
        ("paths_of", [DIGEST * 100, 0, 0, b"", 1]),
        ("paths_of", [DIGEST, 0, 0, b"", 0]),
        ("paths_of", [DIGEST, 0, 0, b"", 2**20]),
        ("paths_of", [DIGEST, -1, 0, b"", 1]),
        ("paths_of", [DIGEST, 0, 2**64 - 1, b"", 1]),
        ("report_corrupt", [b"short"]),
        ("blobs", [[DIGEST, b"short"]]),
        ("blobs", [[b"x" * 5000]]),
        ("stage", [[True]]),
        ("stage", [[-1]]),
        ("stage", [[2**63]]),
        ("discard", [[False]]),
        ("discard", [[1.5]]),
        ("sizes", [["text"]]),
        ("sizes", [[[b"f"]]]),
        ("chunk_sizes", [b"d", b"abc", 2, [[0, 0]]]),
        ("chunk_sizes", [b"d", b"ab" * 5000, 2, [[0, 0]]]),
        ("chunk_sizes", [b"d", b"ab", 2, [[0, 0]] * 4097]),
        ("chunk_sizes", [b"d", b"ab", 2, [b"00"]]),
        ("open", [[b"f"], 1, 0.0]),
        ("open", [[b"f"], True, -1.0]),
        ("open", [[b"f"], True, 60.0]),
        ("locate", [[b"f"] * 300]),
        ("locate", [["f"]]),
        ("warm", [["text"]]),
        ("warm", [[b"f"] * (WARM_WINDOW_FILES + 1)]),
        ("expect", [[b"f"] * 4097]),
        ("expect", [[1]]),
        ("note_gone", [[[64, DIGEST]]]),
        ("note_gone", [[[0]]]),
        ("note_gone", [[[0, DIGEST]] * 4097]),
        ("peer_tickets", [b"short", []]),
        ("peer_tickets", [DIGEST, [[DIGEST, 0, 1]] * 257]),
        ("peer_sizes", [DIGEST, [b"short"]]),
        ("peer_sizes", [b"short", [DIGEST]]),
        ("list", [b"", b"", True]),
        ("list", [b"", b"", 0]),
        ("list", [b"", b"", 2**64 - 1]),
        ("children", [b"", b"", 2**64 - 1, 1]),
        ("children", [b"", b"", -1, 1]),
        ("children_of", [b"", [b"k"] * 5000, 1]),
        ("chunk_sizes", [b"kv/m@f", bytes(5000), 1, []]),
        ("publish", [[[]]]),
        ("publish", [[[True, b"f", DIGEST, 3, None]]]),
        ("publish", [[[[1], b"f", DIGEST, 3, None]]]),
        ("publish", [[[1, b"f", DIGEST, 3]]]),
        ("publish", [[[1, b"f", DIGEST, True, None]]]),
        ("no such", []),
        ("status", [1]),
    ],
)
def test_a_request_that_breaks_a_rule_is_refused_in_words(
    start_node, operation: str, arguments: list[Any]
) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"f", b"abc")
        with pytest.raises(InvalidInput):
            client._call(operation, *arguments)
        assert load_bytes(client, b"f") == b"abc"
        assert client.status()["blobs"] == 1


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("sizes", [[b"x" * 5000, b"d/" + b"x" * 600, b"\0", b"//", b""]]),
        ("chunk_sizes", [b"x" * 5000, b"ab", 2, [[0, 0]]]),
        ("chunk_sizes", [b"x/" * 2000, b"ab", 2, [[0, 0]]]),
        ("chunk_sizes", [b"\0", b"ab", 2, [[0, 0]]]),
        ("open", [[b"x" * 5000, b"d/" + b"x" * 600, b"\0"], True, 0.0]),
        ("touch", [[b"x" * 5000]]),
        ("stat", [b"x" * 5000]),
        ("list", [b"", b"x" * 5000, 1]),
        ("list", [b"x" * 5000, b"", 1]),
        ("children", [b"d", b"x" * 5000, 0, 1]),
        ("paths_of", [DIGEST, 2, 1, b"x" * 5000, 1]),
        ("children_of", [b"d", [b"x" * 5000], 1]),
        ("chunk", [b"x" * 5000]),
        ("set_pinned", [[b"x" * 5000, b"", b"d"], True]),
        ("evict", [[b"x" * 5000, b"", b"d"]]),
        ("verify", [[b"x" * 5000]]),
    ],
)
def test_words_longer_than_any_name_are_misses_or_refused(
    start_node, operation: str, arguments: list[Any]
) -> None:
    node = start_node()
    with Client(node.store) as client:
        store_bytes(client, b"d/f", b"abc")
        try:
            client._call(operation, *arguments)
        except (InvalidInput, NamespaceError):
            pass
        assert load_bytes(client, b"d/f") == b"abc"


@pytest.mark.parametrize(
    ("operation", "rest"),
    [
        ("sizes", []),
        ("open", [True, 0.0]),
        ("touch", []),
        ("set_pinned", [True]),
        ("evict", []),
        ("verify", []),
        ("stat", None),
        ("chunk", None),
        ("list", [b"", 1]),
        ("chunk_sizes", [b"ab", 2, [[0, 0]]]),
        ("children", [b"", 0, 1]),
        ("children_of", [[b""], 1]),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_at_once(
    start_node, operation: str, rest: list[Any] | None
) -> None:
    node = start_node()
    is_batch = operation in ("sizes", "open", "touch", "set_pinned", "evict", "verify")
    with Client(node.store, deadline_s=10) as client:
        for path in (b"a" + b"/" * (15 * 1024 * 1024) + b"b", b"a/" * 2048 + b"b"):
            arguments = [[path] if is_batch else path, *(rest or [])]
            with pytest.raises(InvalidInput, match=f"path: has {len(path)} bytes; 4096 are the"):
                client._call(operation, *arguments)


@pytest.mark.parametrize(
    ("path", "chunk"),
    [
        (b".kvfs", None),
        (b".kvfs/status.json", None),
        (b"/.kvfs//prefixes/x", None),
        (b"", None),
        (b"f", [*CHUNK[:2], True, *CHUNK[3:]]),
        (b"f", [*CHUNK[:2], -1, *CHUNK[3:]]),
        (b"f", [*CHUNK[:2], 2**64 - 1, *CHUNK[3:]]),
        (b"f", [b"x" * 5000, *CHUNK[1:]]),
        (b"f", [CHUNK[0], b"x" * 5000, *CHUNK[2:]]),
        (b"f", [*CHUNK[:6], b"x" * 5000]),
    ],
)
def test_a_refused_publication_uses_its_stage_up(
    start_node, path: bytes, chunk: list[Any] | None
) -> None:
    node = start_node()
    with Client(node.store) as client:
        (staged,) = client.stage([3])
        os.pwrite(staged.fd, b"abc", 0)
        os.close(staged.fd)
        with pytest.raises((InvalidInput, NamespaceError)):
            client._call("publish", [[staged.token, path, DIGEST, 3, chunk]])
        assert client.status()["blobs"] == 0
        assert client.status()["directories"][0]["staging_bytes"] == 0
        assert client.entries(b"") == []
        assert os.listdir(node.store / "staging") == []


def test_what_only_looks_like_the_mounts_own_name_is_published(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        for path in (b".kvfs2", b"d/.kvfs/f"):
            store_bytes(client, path, b"abc")
            assert load_bytes(client, path) == b"abc"


def test_a_token_named_twice_uses_all_stages_up(start_node) -> None:
    node = start_node()
    with Client(node.store) as client:
        staged = client.stage([3, 3])
        files = [StagedFile(item.token, b"f%d" % item.fd, DIGEST, 3) for item in staged]
        for item in staged:
            os.pwrite(item.fd, b"abc", 0)
            os.close(item.fd)
        with pytest.raises(InvalidInput, match="twice"):
            client.publish([files[0], files[1], files[0]])
        assert os.listdir(node.store / "staging") == []
        assert client.status()["directories"][0]["staging_bytes"] == 0


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x81\x91\x01\x02", id="a map with a list as its key"),
        pytest.param(b"\x93\x01\xa6status\x91\x81\x80\x02", id="deep down, a map as a key"),
        pytest.param(b"\x93\xc3\xa6status\x90", id="a bool as the number"),
        pytest.param(b"\x91" * 5000 + b"\x90", id="lists in lists in lists"),
        pytest.param(b"\xc1", id="a byte that msgpack never uses"),
        pytest.param(msgpack.packb([1, "status", {}]), id="arguments that are no list"),
        pytest.param(b"\xdd\x00\x10\x00\x00" + b"\x80" * 2**20, id="a million empty maps"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_malformed_frame_costs_its_sender_the_connection_only(start_node, body: bytes) -> None:
    node = start_node()
    with Client(node.store) as other, _greeted(node.store) as sender:
        store_bytes(other, b"f", b"abc")
        sender.sendall(struct.pack("<I", len(body)) + body)
        assert sender.recv(1000) == b""
        assert load_bytes(other, b"f") == b"abc"  # on the connection that it had
        assert other.status()["clients"] == 1


def test_a_client_too_many_is_told_the_limit(start_node) -> None:
    node = start_node(allow="refused a client")
    held = [_greeted(node.store) for _ in range(CLIENTS_MAX)]
    try:
        for _ in range(2):
            with (
                Client(node.store) as client,
                pytest.raises(Unavailable, match=f"{node.store}: {CLIENTS_MAX} clients are"),
            ):
                client.status()
        held.pop().close()
        with Client(node.store) as client:
            wait_until(lambda: _is_answered(client))
    finally:
        for connection in held:
            connection.close()


def _is_answered(client: Client) -> bool:
    try:
        return bool(client.status()["clients"] == CLIENTS_MAX)
    except Unavailable:
        return False


def _greeted(store: Path) -> socket.socket:
    """A connection of our own that the node has said hello on."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    connection.connect(os.fspath(store / "node.sock"))
    hello: bytes = msgpack.packb([1, "hello", [PROTOCOL]])
    connection.sendall(struct.pack("<I", len(hello)) + hello)
    assert connection.recv(1000)
    return connection
