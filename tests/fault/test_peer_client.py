"""A client whose peer is dead, frozen or says nothing: one error in time, no leak."""

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.config import MIB, PeerLimits
from kvfs.errors import KvfsError, Unavailable
from kvfs.peers.client import PeerClient
from scripts.peer_rig import DirectorySource, PeerProcess
from tests.peers import (
    QUICK,
    asking,
    is_settled,
    kernel_threads,
    make_keys,
    open_descriptors,
    read_whole,
    refused_s,
    serves,
    serving,
)
from tests.processes import wait_until
from tests.scripted_peers import scripted

ABSENT = b"a" * 16
DIGEST = b"d" * 16


@pytest.fixture
def frozen_at_the_end() -> Iterator[list[PeerProcess]]:
    """Processes that are killed at the end, frozen or not."""
    started: list[PeerProcess] = []
    yield started
    for process in started:
        process.kill()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_peer_killed_in_the_middle_of_a_read_costs_one_error(
    tmp_path: Path, encrypted: bool, frozen_at_the_end: list[PeerProcess]
) -> None:
    server_keys, client_keys = make_keys(tmp_path)
    (tmp_path / "known").write_text(f"{client_keys.pair.public} client\n")
    source = DirectorySource(tmp_path)
    size = 512 * MIB
    with open(tmp_path / DIGEST.hex(), "wb") as file:
        file.truncate(size)
    words = ["--pair", str(tmp_path / "server.pair"), "--known", str(tmp_path / "known")]
    peer = PeerProcess(tmp_path, words)
    frozen_at_the_end.append(peer)
    small = source.add(b"abc")
    buffer = memoryview(bytearray(size))
    buffer[0] = buffer[-1] = 0xFF
    errors: list[KvfsError] = []

    def read() -> None:
        try:
            client.read_into(DIGEST, 0, buffer, 60)
        except KvfsError as error:
            errors.append(error)

    key = server_keys.pair.public
    with asking(peer.port, client_keys, key, encrypt_bulk=encrypted) as client:
        assert read_whole(client, small, 3) == b"abc"
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: buffer[0] == 0)
        peer.freeze()  # so that it does not finish first
        begin_s = time.monotonic()
        peer.kill()
        reader.join(20)
        assert not reader.is_alive() and time.monotonic() - begin_s < 10
        assert buffer[-1] == 0xFF and len(errors) == 1 and isinstance(errors[0], Unavailable)
        assert refused_s(lambda: client.sizes([small], 5)) < 2


@pytest.mark.parametrize("deadline_s", [0.3, 30.0], ids=["short", "long"])
def test_a_frozen_peer_costs_one_error_in_time_and_is_back_when_it_thaws(
    tmp_path: Path, deadline_s: float, frozen_at_the_end: list[PeerProcess]
) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(bytes(1000))
    peer = PeerProcess(tmp_path)
    frozen_at_the_end.append(peer)
    limits = replace(QUICK, backoff_s_min=0.5, backoff_s_max=0.5)
    with asking(peer.port, limits=limits) as client:
        assert read_whole(client, digest, 1000) == bytes(1000)
        peer.freeze()
        # The deadline, or what the peer may take to move anything.
        assert refused_s(lambda: client.sizes([digest], deadline_s)) < 5
        for _ in range(5):
            spent_s = refused_s(lambda: client.sizes([digest], deadline_s), "did not answer")
            assert spent_s < 0.2
        buffer = memoryview(bytearray(1000))
        assert refused_s(lambda: client.read_into(digest, 0, buffer, deadline_s)) < 5
        peer.thaw()
        wait_until(lambda: serves(client, digest))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_who_has_others_to_ask_leaves_a_frozen_peer_sooner(
    tmp_path: Path, encrypted: bool, frozen_at_the_end: list[PeerProcess]
) -> None:
    server_keys, client_keys = make_keys(tmp_path)
    (tmp_path / "known").write_text(f"{client_keys.pair.public} client\n")
    digest = DirectorySource(tmp_path).add(bytes(1000))
    words = ["--pair", str(tmp_path / "server.pair"), "--known", str(tmp_path / "known")]
    peer = PeerProcess(tmp_path, words)
    frozen_at_the_end.append(peer)
    limits = replace(QUICK, progress_s=60)
    key = server_keys.pair.public
    with asking(peer.port, client_keys, key, encrypt_bulk=encrypted, limits=limits) as client:
        assert read_whole(client, digest, 1000) == bytes(1000)
        peer.freeze()
        buffer = memoryview(bytearray(1000))
        assert refused_s(lambda: client.read_into(digest, 0, buffer, 60, silence_s=0.3)) < 5


def test_a_dead_peer_is_refused_at_once_and_asked_ever_more_seldom() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    descriptors, threads = open_descriptors(), kernel_threads()
    with asking(port, limits=replace(QUICK, backoff_s_min=0.2, backoff_s_max=5)) as client:
        assert refused_s(lambda: client.health(10), "cannot be reached") < 5
        assert refused_s(lambda: client.health(10), "is asked again in 0.") < 0.2
        wait_until(lambda: _message(client) == "cannot be reached")
        assert refused_s(lambda: client.health(10), "is asked again in 0.[34]") < 0.2
    assert is_settled(open_descriptors, descriptors)
    assert is_settled(kernel_threads, threads)


def _message(client: PeerClient) -> str:
    try:
        client.health(10)
    except Unavailable as error:
        return str(error).partition(": ")[2]
    return ""


def test_a_host_that_accepts_and_says_nothing_is_unavailable_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with asking(port, limits=QUICK) as client:
            assert refused_s(lambda: client.sizes([ABSENT], 0.3)) < 3
            time.sleep(QUICK.backoff_s_max)
            assert refused_s(lambda: client.sizes([ABSENT], 30)) < 5


def test_closing_ends_calls_that_wait_in_other_threads() -> None:
    descriptors, threads = open_descriptors(), kernel_threads()
    errors: list[KvfsError] = []

    def ask() -> None:
        try:
            client.sizes([ABSENT], 60)
        except Unavailable as error:
            errors.append(error)

    with scripted(lambda number, request: None) as peer:
        with asking(peer.port, limits=replace(PeerLimits(), progress_s=60)) as client:
            asked = [threading.Thread(target=ask) for _ in range(3)]
            for thread in asked:
                thread.start()
            wait_until(lambda: len(peer.requests) == 3)
            begin_s = time.monotonic()
            client.close()
            assert time.monotonic() - begin_s < 3
        for thread in asked:
            thread.join(10)
        assert ["the client is closed" in str(error) for error in errors] == [True] * 3
    assert is_settled(open_descriptors, descriptors)
    assert is_settled(kernel_threads, threads)


def test_too_few_descriptors_are_an_error_and_pass(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(bytes(1000))
    peer = PeerProcess(tmp_path)  # in another process, which has enough
    try:
        with asking(peer.port, limits=QUICK) as client:
            assert serves(client, digest)
            client._channels.drop_idle()
            client._streams.drop_idle()
            before = open_descriptors()
            held = []
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, limits[1]))
            try:
                for spare in range(12):  # at each step of making a channel and a stream
                    while _can_open(held):
                        pass
                    for fd in held[:spare]:
                        os.close(fd)
                    del held[:spare]
                    try:
                        client.read_into(digest, 0, memoryview(bytearray(1000)), 10)
                    except Unavailable:
                        time.sleep(QUICK.backoff_s_max)
                    client._channels.drop_idle()
                    client._streams.drop_idle()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for fd in held:
                    os.close(fd)
            wait_until(lambda: serves(client, digest))
    finally:
        peer.kill()


def _can_open(held: list[int]) -> bool:
    try:
        held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def test_a_deadline_that_has_passed_already_is_an_error_and_no_more(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    digest = source.add(bytes(1000))
    with serving(source) as server, asking(server.port) as client:
        for deadline_s in (0.0, -1.0):
            with pytest.raises(Unavailable):
                client.read_into(digest, 0, memoryview(bytearray(1000)), deadline_s)
        wait_until(lambda: serves(client, digest))
