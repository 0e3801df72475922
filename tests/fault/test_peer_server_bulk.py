"""Who breaks rules or stalls on a bulk stream loses it, and an honest client nothing."""

import os
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.config import MIB
from kvfs.peers.messages import Range
from tests.peers import (
    DATA,
    DEADLINE_S,
    HEADER,
    QUICK,
    Ground,
    RawChannel,
    is_hung_up,
    receive_exactly,
)
from tests.processes import wait_until

HERE, GONE, NO_TICKET, FAILED = range(4)


def _bulk(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), DEADLINE_S)


def test_what_is_no_ticket_ends_the_stream(ground: Ground) -> None:
    with RawChannel(ground.server.port) as channel:
        port = channel.greet().bulk_port
        with _bulk(port) as stream:
            stream.sendall(os.urandom(32 * 5))
            assert receive_exactly(stream, HEADER.size) == HEADER.pack(b"KVB1", NO_TICKET, 0)
            assert is_hung_up(stream)


@pytest.mark.parametrize("said", [b"", bytes(31)], ids=["nothing", "a part of a ticket"])
def test_a_stream_that_says_too_little_is_ended(ground: Ground, said: bytes) -> None:
    with RawChannel(ground.server.port) as channel:
        port = channel.greet().bulk_port
        with _bulk(port) as stream:
            stream.sendall(said)
            assert is_hung_up(stream)


def test_a_ticket_is_of_use_once_for_its_range_only(ground: Ground) -> None:
    with RawChannel(ground.server.port) as channel:
        port = channel.greet().bulk_port
        (ticket,) = ground.tickets(channel, 2, [Range(ground.digest, 5, 100)])
        with _bulk(port) as stream:
            stream.sendall(ticket)
            assert receive_exactly(stream, HEADER.size) == HEADER.pack(b"KVB1", HERE, 100)
            assert receive_exactly(stream, 100) == DATA[5:105]
            stream.sendall(ticket)
            assert receive_exactly(stream, HEADER.size) == HEADER.pack(b"KVB1", NO_TICKET, 0)
            assert is_hung_up(stream)


def test_tickets_are_answered_in_order_however_they_are_cut(ground: Ground) -> None:
    with RawChannel(ground.server.port) as channel:
        port = channel.greet().bulk_port
        ranges = [Range(ground.digest, index * 7, index + 1) for index in range(300)]
        sent = b"".join(ground.tickets(channel, 2, ranges))
        with _bulk(port) as stream:
            for begin in range(0, len(sent), 1000):
                stream.sendall(sent[begin : begin + 1000])
            for item in ranges:
                header = receive_exactly(stream, HEADER.size)
                assert header == HEADER.pack(b"KVB1", HERE, item.length)
                data = receive_exactly(stream, item.length)
                assert data == DATA[item.offset : item.offset + item.length]


def test_a_client_that_never_reads_loses_its_stream(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ground = Ground(tmp_path, stack, replace(QUICK, stream_idle_s=60))
        large = ground.source.add(bytes(64 * MIB))
        channel = stack.enter_context(RawChannel(ground.server.port))
        port = channel.greet().bulk_port
        (ticket,) = ground.tickets(channel, 2, [Range(large, 0, 64 * MIB)])
        stream = stack.enter_context(_bulk(port))
        assert ground.is_well()
        stream.sendall(ticket)
        assert receive_exactly(stream, HEADER.size) == HEADER.pack(b"KVB1", HERE, 64 * MIB)
        assert ground.server.stream_count == 2
        wait_until(lambda: ground.server.stream_count == 1)
        assert ground.is_well()


def test_a_client_that_reads_by_drops_loses_its_stream(tmp_path: Path) -> None:
    """Each wait ends in time, but all together do not."""
    with ExitStack() as stack:
        limits = replace(QUICK, stream_bytes_per_s_min=64 * MIB, stream_idle_s=60)
        ground = Ground(tmp_path, stack, limits)
        large = ground.source.add(bytes(64 * MIB))
        channel = stack.enter_context(RawChannel(ground.server.port))
        port = channel.greet().bulk_port
        (ticket,) = ground.tickets(channel, 2, [Range(large, 0, 64 * MIB)])
        stream = stack.enter_context(_bulk(port))
        stream.sendall(ticket)
        received = 0
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            try:
                data = stream.recv(65_536)
            except ConnectionError:
                break
            if not data:
                break
            received += len(data)
            time.sleep(0.02)
        assert received < 64 * MIB and time.monotonic() < end_s


def test_streams_of_strangers_go_before_those_with_tickets(tmp_path: Path) -> None:
    with ExitStack() as stack:
        limits = replace(QUICK, streams_max=4, progress_s=30, stream_idle_s=60)
        ground = Ground(tmp_path, stack, limits)
        channel = stack.enter_context(RawChannel(ground.server.port))
        port = channel.greet().bulk_port
        (first, second) = ground.tickets(channel, 2, [Range(ground.digest, 0, 9)] * 2)
        trusted = stack.enter_context(_bulk(port))
        trusted.sendall(first)
        assert receive_exactly(trusted, HEADER.size + 9)[-9:] == DATA[:9]
        strangers = [stack.enter_context(_bulk(port)) for _ in range(10)]
        assert is_hung_up(strangers[0])
        trusted.sendall(second)
        assert receive_exactly(trusted, HEADER.size + 9)[-9:] == DATA[:9]
        assert ground.server.stream_count <= 4


def test_a_blob_that_cannot_be_opened_is_a_miss_and_the_stream_goes_on(
    tmp_path: Path, allow_warnings: list[str]
) -> None:
    allow_warnings.append("a blob cannot be opened for a peer")
    with ExitStack() as stack:
        ground = Ground(tmp_path, stack)
        bad = ground.source.add(b"bad")
        path = tmp_path / bad.hex()
        path.unlink()
        path.symlink_to(path.name)  # ELOOP
        lost = ground.source.add(b"lost")
        real_sizes = ground.source.sizes

        def sizes(digests: list[bytes]) -> list[int | None]:
            return [3 if digest == bad else real_sizes([digest])[0] for digest in digests]

        ground.source.sizes = sizes  # type: ignore[method-assign, assignment]  # as a stale index does
        buffers = [memoryview(bytearray(size)) for size in (3, 4, len(DATA))]
        wants = list(zip((bad, lost, ground.digest), (0, 0, 0), buffers, strict=True))
        assert ground.client.read_many(wants, DEADLINE_S) == [False, True, True]
        assert bytes(buffers[2]) == DATA


def test_a_blob_that_gets_shorter_while_it_is_sent_ends_the_stream(
    tmp_path: Path, allow_warnings: list[str]
) -> None:
    """What was promised can't be made up: the client must not take something else for it."""
    allow_warnings.append("a blob got shorter")
    with ExitStack() as stack:
        ground = Ground(tmp_path, stack, replace(QUICK, progress_s=10))
        large = ground.source.add(bytes(64 * MIB))
        channel = stack.enter_context(RawChannel(ground.server.port))
        port = channel.greet().bulk_port
        (ticket,) = ground.tickets(channel, 2, [Range(large, 0, 64 * MIB)])
        stream = stack.enter_context(_bulk(port))
        stream.sendall(ticket)
        receive_exactly(stream, HEADER.size + 1)  # it is under way
        os.truncate(tmp_path / large.hex(), MIB)
        received = 1
        while data := stream.recv(MIB):
            received += len(data)
        assert received < 64 * MIB
        assert ground.is_well()
