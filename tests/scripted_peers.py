"""Peers that say what a test has them say, on their channel and on bulk streams."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import zmq

from kvfs.peers.messages import Hello, Reply, Request, Welcome, decode_request, encode
from scripts.peer_rig import SERVER_ID
from tests.peers import DEADLINE_S, receive_exactly

Script = Callable[[int, Request], "list[bytes] | Reply | None"]


class ScriptedPeer:
    """A peer's channel; `script` answers all but the greeting with a reply, parts, or nothing."""

    def __init__(self, script: Script, bulk_port: int = 1) -> None:
        self.requests: list[Request] = []
        self._script = script
        self._bulk_port = bulk_port
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(20)
        self._socket.close(0)
        self._context.term()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(20):
                continue
            route, body = self._socket.recv_multipart()
            number, request = decode_request(body)
            if isinstance(request, Hello):
                answer: list[bytes] | Reply | None = self._greet(request)
            else:
                self.requests.append(request)
                answer = self._script(number, request)
            if answer is None:
                continue
            parts = answer if isinstance(answer, list) else [encode(number, answer)]
            self._socket.send_multipart([route, *parts])

    def _greet(self, hello: Hello) -> Reply:
        return Welcome(SERVER_ID, hello.nonce, "", self._bulk_port)


@contextmanager
def scripted(script: Script, bulk_port: int = 1) -> Iterator[ScriptedPeer]:
    peer = ScriptedPeer(script, bulk_port)
    try:
        yield peer
    finally:
        peer.close()


@contextmanager
def scripted_bulk(connections: list[list[bytes]], *, hang_up: bool = True) -> Iterator[int]:
    """A bulk listener; its port. For each connection what it says to one ticket after the other; at
    the end it hangs up, or says nothing. More connections than scripts get the last one."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)

        def serve(connection: socket.socket, script: list[bytes]) -> None:
            connection.settimeout(DEADLINE_S)
            try:
                for said in script:
                    receive_exactly(connection, 32)
                    connection.sendall(said)
            except (AssertionError, OSError):  # the client has gone
                return
            if hang_up:
                connection.close()

        def accept() -> None:
            with ExitStack() as stack:
                accepted = 0
                while not ended.is_set():
                    try:
                        connection = stack.enter_context(listener.accept()[0])
                    except TimeoutError:
                        continue
                    script = connections[min(accepted, len(connections) - 1)]
                    accepted += 1
                    thread = threading.Thread(target=serve, args=(connection, script))
                    thread.start()
                    stack.callback(thread.join, 20)
                    stack.callback(_shut, connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join(20)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is closed
        pass
