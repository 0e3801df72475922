"""Many directory entries of the server in one exchange, packed and read here.

Plain commands cost the server half of what a script does with the same keys, but the client's
library needs some 3 us for each word and 10 us for each command, which was more than all the rest.
So only its connection is used. What comes is read as far as it is what was expected; of anything
else, an error among them, nothing is made: the library is to ask then, which knows them all.
"""

import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import redis

from kvfs.meta.records import NO_DIRENT

_GROUP_BYTES = 8  # of a key: the number of its directory
_PART_KEYS = 128  # the server begins with those while the next ones are packed
_RECEIVE_BYTES = 64 * 1024
_HIT_BYTES = len(b"$16\r\n\r\n") + len(NO_DIRENT)
_MISS = b"$-1\r\n"
_VALUE = re.compile(rb"\$(?:16\r\n(.{16})|-1)\r\n", re.DOTALL)
# An error, or a value of another length; hardly ever within a value, and no harm there.
_STRANGE = re.compile(rb"(?:\A|\r\n)-[A-Z]{3}|\r\n\$(?:[02-9]|1[^6]|16[^\r])")


def by_directory(keys: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """The keys of entries, by the directory that is the first part of them."""
    groups: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key in keys:
        groups[key[:_GROUP_BYTES]].append(key)
    return groups


class DirentsQuestion:
    """What is asked of a server of some epoch, once."""

    def __init__(
        self, groups: Mapping[bytes, Sequence[bytes]], prefix: bytes, epoch: bytes
    ) -> None:
        """`groups`: as `by_directory` makes them. `prefix`: of all keys on the server."""
        self._groups = groups
        self._prefix = prefix
        self._count = sum(map(len, groups.values()))
        self._first = b"$%d\r\n%b\r\n" % (len(epoch), epoch)  # of a right answer
        self._whole_bytes = len(self._first) + self._count * _HIT_BYTES  # of one without a miss

    def ask(self, client: "redis.Redis", deadline_s: float) -> list[bytes] | None:
        """The entries in order of the groups, `NO_DIRENT` for none; None where the library is to
        ask. Raises `RedisError`."""
        pool = client.connection_pool
        connection = pool.get_connection()
        found = None
        try:
            connection.send_packed_command(self.pack(), check_health=False)  # type: ignore[no-untyped-call]  # theirs has no types
            found = self._receive(connection, time.monotonic() + deadline_s)
        finally:
            if found is None:  # more of its answer may be on the way
                connection.disconnect()  # type: ignore[no-untyped-call]  # as above
            pool.release(connection)
        return found

    def _receive(self, connection: "redis.Connection", end_s: float) -> list[bytes] | None:
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
            found = self.read(answer)
            if found is not None or self.is_unexpected(answer):
                return found
        raise redis.TimeoutError("Timeout reading from socket")

    # The codec -----------------------------------------------------------------------------------
    def pack(self) -> Iterator[bytes]:
        """The commands, in parts; after them `read` knows what to expect."""
        name = self._prefix + b"epoch"
        parts = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b" % (len(name), name)]
        name = self._prefix + b"d"
        ask = b"$5\r\nHMGET\r\n$%d\r\n%b" % (len(name) + _GROUP_BYTES, name)
        waiting = 0
        for group, keys in self._groups.items():
            count = len(keys)
            parts.append(b"*%d\r\n%b%b" % (count + 2, ask, group))
            parts += _pack_names([key[_GROUP_BYTES:] for key in keys])
            self._whole_bytes += len(b"*%d\r\n" % count)
            waiting += count
            if waiting >= _PART_KEYS:
                yield b"\r\n".join(parts) + b"\r\n"
                parts, waiting = [], 0
        if parts:
            yield b"\r\n".join(parts) + b"\r\n"

    def read(self, answer: bytearray) -> list[bytes] | None:
        """The entries, once all of the answer is there and it is as expected."""
        missing_bytes = self._whole_bytes - len(answer)
        misses, rest = divmod(missing_bytes, _HIT_BYTES - len(_MISS))
        if rest or answer.count(_MISS) < misses or not answer.startswith(self._first):
            return None
        found = _VALUE.findall(answer, len(self._first))
        if len(found) != self._count or found.count(b"") != misses:
            return None
        return [value or NO_DIRENT for value in found] if misses else found

    def is_unexpected(self, answer: bytearray) -> bool:
        """Whether it cannot become one that `read` takes, or does not seem to."""
        return (
            not self._first.startswith(answer[: len(self._first)])
            or len(answer) > self._whole_bytes
            or _STRANGE.search(answer) is not None
        )


def _pack_names(names: Sequence[bytes]) -> list[bytes]:
    """As words of a command, in one step where they are as long as each other."""
    sizes = set(map(len, names))
    if len(sizes) == 1:
        head = b"$%d\r\n" % sizes.pop()
        return [head + (b"\r\n" + head).join(names)]
    return [b"$%d\r\n%b" % (len(name), name) for name in names]
