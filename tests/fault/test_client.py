"""A client whose node answers late, wrongly or not at all: deadlines hold, nothing leaks."""

import array
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.client import Client
from kvfs.client_files import StagedFile
from kvfs.config import (
    BATCH_ITEMS_MAX,
    DESCRIPTORS_PER_MESSAGE_MAX,
    FRAME_BYTES_MAX,
    PATH_BYTES_MAX,
)
from kvfs.digest import digest_of
from kvfs.errors import InvalidInput, KvfsError, OutOfSpace, Unavailable
from kvfs.wire import PROTOCOL, FrameDecoder, Reply, Request, decode_request, encode_reply
from tests.conftest import StartNode
from tests.processes import wait_until

# What a request gets: a result, that many descriptors and the error; None: no answer.
Answer = tuple[Any, int, KvfsError | None] | None
BATCH = DESCRIPTORS_PER_MESSAGE_MAX


class ScriptedNode:
    """A node's socket on threads of this process; `script` answers all but the greeting."""

    def __init__(self, store: Path, script: Callable[[Request], Answer]) -> None:
        self.requests: list[Request] = []
        self.connections = 0
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(store / "node.sock"))
        self._listener.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        decoder = FrameDecoder()
        with connection, contextlib.suppress(OSError):  # the client has gone
            while data := connection.recv(65_536):
                for value in decoder.feed(data):
                    self._answer(connection, decode_request(value))

    def _answer(self, connection: socket.socket, request: Request) -> None:
        if request.operation == "hello":
            connection.sendall(encode_reply(Reply(request.number, [PROTOCOL, "id"])))
            return
        self.requests.append(request)
        answer = self._script(request)
        if answer is None:
            return
        result, count, error = answer
        frame = encode_reply(Reply(request.number, result, count, error))
        descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
        sent = connection.sendmsg([frame], ancillary)
        connection.sendall(frame[sent:])
        for fd in descriptors:
            os.close(fd)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[Callable[[Request], Answer]], ScriptedNode]]:
    """Start a `ScriptedNode` in tmp_path."""
    started: list[ScriptedNode] = []

    def start(script: Callable[[Request], Answer]) -> ScriptedNode:
        started.append(ScriptedNode(tmp_path, script))
        return started[-1]

    yield start
    for node in started:
        node.close()


def open_devnulls() -> int:
    """Descriptors of this process that a scripted node handed out."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}") == os.devnull
        except FileNotFoundError:
            continue
    return count


def settled_devnulls(expected: int) -> bool:
    """Whether so many stay open; the node's thread closes its own a moment after it sent them."""
    end_s = time.monotonic() + 5
    while open_devnulls() != expected and time.monotonic() < end_s:
        time.sleep(0.01)
    return open_devnulls() == expected


def test_a_call_does_not_wait_for_another_threads_longer_than_its_deadline(
    scripted, tmp_path: Path
) -> None:
    release = threading.Event()

    def script(request: Request) -> Answer:
        if request.operation == "gc":
            release.wait(30)
        return ({}, 0, None)

    node = scripted(script)
    client = Client(tmp_path, deadline_s=1.0)
    collected: list[object] = []
    slow = threading.Thread(target=lambda: collected.append(client.gc()))
    slow.start()
    wait_until(lambda: bool(node.requests))
    begin_s = time.monotonic()
    with pytest.raises(Unavailable, match="another thread's call"):
        client.status()
    assert time.monotonic() - begin_s < 1.0
    release.set()
    slow.join(30)
    assert collected == [{}]  # its connection was left alone
    assert client.status() == {}
    assert node.connections == 1
    client.close()


def test_closing_ends_a_call_that_another_thread_waits_in(scripted, tmp_path: Path) -> None:
    node = scripted(lambda request: None)
    client = Client(tmp_path, deadline_s=1.0)
    failed: list[BaseException] = []

    def collect() -> None:
        try:
            client.gc()
        except Unavailable as error:
            failed.append(error)

    slow = threading.Thread(target=collect)
    slow.start()
    wait_until(lambda: bool(node.requests))
    client.close()
    slow.join(10)
    assert not slow.is_alive() and len(failed) == 1


@pytest.mark.parametrize("failure", [None, OutOfSpace("full")])
def test_a_later_batch_that_fails_costs_no_descriptors(
    scripted, tmp_path: Path, failure: KvfsError | None
) -> None:
    def script(request: Request) -> Answer:
        if len(node.requests) > 1:
            return None if failure is None else (None, 0, failure)
        return ([[1, b"d" * 16]] * BATCH, BATCH, None)

    before = open_devnulls()
    node = scripted(script)
    with Client(tmp_path, deadline_s=1.0) as client:
        with pytest.raises((Unavailable, OutOfSpace)):
            client.open([b"f"] * (BATCH + 1))
        assert settled_devnulls(before)


@pytest.mark.parametrize("failure", [None, OutOfSpace("full")])
def test_a_later_batch_that_is_not_staged_costs_neither_descriptors_nor_tokens(
    scripted, tmp_path: Path, failure: KvfsError | None
) -> None:
    def script(request: Request) -> Answer:
        if request.operation == "discard":
            return (None, 0, None)
        if len(node.requests) > 1:
            return None if failure is None else (None, 0, failure)
        return (list(range(BATCH)), BATCH, None)

    before = open_devnulls()
    node = scripted(script)
    with Client(tmp_path, deadline_s=1.0) as client:
        with pytest.raises((Unavailable, OutOfSpace)):
            client.stage([1] * (BATCH + 1))
        assert settled_devnulls(before)
    discarded = [request.arguments[0] for request in node.requests[2:]]
    assert discarded == ([] if failure is None else [list(range(BATCH))])


def test_a_report_of_bad_bytes_may_take_as_long_as_reading_them(scripted, tmp_path: Path) -> None:
    def script(request: Request) -> Answer:
        time.sleep(0.6)
        return (True, 0, None)

    scripted(script)
    with Client(tmp_path, deadline_s=0.3) as client:
        assert client.report_corrupt(b"d" * 16)


def test_a_request_that_fits_no_frame_costs_nobody_the_connection(scripted, tmp_path: Path) -> None:
    def script(request: Request) -> Answer:
        return ([7], 1, None) if request.operation == "stage" else (None, 0, None)

    node = scripted(script)
    with Client(tmp_path, deadline_s=5.0) as client:
        (staged,) = client.stage([1])
        os.close(staged.fd)
        with pytest.raises(InvalidInput, match="fit a frame"):
            client.touch([b"x" * FRAME_BYTES_MAX])
        client.publish([StagedFile(staged.token, b"f", b"d" * 16, 1)])
    assert node.connections == 1
    assert [request.operation for request in node.requests] == ["stage", "publish"]


def test_the_longest_paths_go_in_as_many_requests_as_they_need(scripted, tmp_path: Path) -> None:
    paths = [b"%04d" % n + b"x" * (PATH_BYTES_MAX - 4) for n in range(BATCH_ITEMS_MAX)]
    node = scripted(lambda request: ([int(path[:4]) for path in request.arguments[0]], 0, None))
    with Client(tmp_path, deadline_s=30.0) as client:
        assert client.lookup(paths) == list(range(BATCH_ITEMS_MAX))
    assert len(node.requests) > 1


def test_a_report_of_bad_bytes_keeps_to_the_deadline_it_is_given(scripted, tmp_path: Path) -> None:
    scripted(lambda request: None)
    with Client(tmp_path, deadline_s=30.0) as client:
        begin_s = time.monotonic()
        with pytest.raises(Unavailable):
            client.report_corrupt(b"d" * 16, deadline_s=0.2)
        assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_client_that_did_nothing_while_its_node_was_restarted_does_not_notice(
    start_node: StartNode, is_killed: bool
) -> None:
    node = start_node()
    with Client(node.store) as client:
        (staged,) = client.stage([5])
        with os.fdopen(staged.fd, "wb") as file:
            file.write(b"bytes")
        node.kill() if is_killed else node.stop()
        again = start_node(store=node.store)
        mine = StagedFile(staged.token, b"mine", digest_of(b"bytes"), 5, None)
        with pytest.raises(Unavailable):  # what was staged went with the node
            client.publish([mine])
        assert client.lookup([b"mine"]) == [None]
        again.stop()
        start_node(store=node.store)
        assert client.lookup([b"mine"]) == [None]
