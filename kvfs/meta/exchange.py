"""One question to the server and its answer, packed and read here and not by the client's library.

The library needs some 3 us for each word, 10 us for each command and 100 us for each exchange, more
than the server's own work. So only its connections are used. What comes is read as far as it is
what was expected; of anything else, an error among them, nothing is made: the library is to ask
then, which knows them all.
"""

import socket
import time
from collections.abc import Iterable
from typing import Protocol, TypeVar

import redis

from kvfs.config import META_ANSWER_BYTES_MAX

_RECEIVE_BYTES = 64 * 1024
_Found_co = TypeVar("_Found_co", covariant=True)
_Found = TypeVar("_Found")


class Unexpected(Exception):
    """An answer that is not of the form that its question knows."""


class Question(Protocol[_Found_co]):
    """What is asked, once, and how its answer is read."""

    def pack(self) -> Iterable[bytes]:
        """The commands, in parts that are sent one by one."""
        ...

    def read(self, answer: bytearray) -> _Found_co | None:
        """What was found; None while more of the answer is to come. It is called each time that
        some came. Raises `Unexpected` as soon as that can be said."""
        ...


def exchange(client: "redis.Redis", question: Question[_Found], deadline_s: float) -> _Found | None:
    """What the server answers; None where the library is to ask. Raises `RedisError`."""
    pool = client.connection_pool
    connection = pool.get_connection()
    found = None
    try:
        connection.send_packed_command(question.pack(), check_health=False)  # type: ignore[no-untyped-call]  # theirs has no types
        found = _receive(connection, question, time.monotonic() + deadline_s)
    except Unexpected:
        pass
    finally:
        if found is None:  # more of its answer may be on the way
            connection.disconnect()  # type: ignore[no-untyped-call]  # as above
        pool.release(connection)
    return found


def _receive(connection: "redis.Connection", question: Question[_Found], end_s: float) -> _Found:
    sock: socket.socket | None = connection._sock  # there is no other way to its bytes
    assert sock is not None  # or sending would have failed
    answer = bytearray()
    while time.monotonic() < end_s:
        try:
            data = sock.recv(_RECEIVE_BYTES)
        except TimeoutError:
            break
        except OSError as error:
            raise redis.ConnectionError(f"Error while reading from socket: {error}") from error
        if not data:
            raise redis.ConnectionError("Connection closed by server.")
        answer += data
        if len(answer) > META_ANSWER_BYTES_MAX:
            raise Unexpected
        found = question.read(answer)
        if found is not None:
            return found
    raise redis.TimeoutError("Timeout reading from socket")
