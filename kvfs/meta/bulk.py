"""Many directory entries of the server in one exchange: what is sent, and how the answer is read.

Plain commands cost the server half of what a script does with the same keys. An engine waits for
this, so that as little as possible is done in Python for each entry.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from kvfs.meta.exchange import Unexpected
from kvfs.meta.records import NO_DIRENT

_GROUP_BYTES = 8  # of a key: the number of its directory
_PART_KEYS = 128  # the server begins with those while the next ones are packed
_HIT_BYTES = len(b"$16\r\n\r\n") + len(NO_DIRENT)
_MISS = b"$-1\r\n"
_VALUE = re.compile(rb"\$(?:16\r\n(.{16})|-1)\r\n", re.DOTALL)
_SOUND = re.compile(rb"(?:\$16\r\n.{16}\r\n|\$-1\r\n|\*\d+\r\n)*", re.DOTALL)
_BEGUN = re.compile(rb"\*\d*\r?|\$(?:1?|16\r?|16\r\n.{0,16}\r?|-|-1\r?)", re.DOTALL)


def by_directory(keys: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """The keys of entries, by the directory that is the first part of them."""
    groups: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key in keys:
        groups[key[:_GROUP_BYTES]].append(key)
    return groups


class DirentsQuestion:
    """What is asked of a server of some epoch, once: the entries in order of the groups,
    `NO_DIRENT` for none."""

    def __init__(
        self, groups: Mapping[bytes, Sequence[bytes]], prefix: bytes, epoch: bytes
    ) -> None:
        """`groups`: as `by_directory` makes them. `prefix`: of all keys on the server."""
        self._groups = groups
        self._prefix = prefix
        self._count = sum(map(len, groups.values()))
        self._first = b"$%d\r\n%b\r\n" % (len(epoch), epoch)  # of a right answer
        self._whole_bytes = len(self._first) + self._count * _HIT_BYTES  # of one without a miss
        self._sound_bytes = 0  # of the answer, which were looked at and are as expected

    def pack(self) -> Iterator[bytes]:
        """As `Question.pack`; after it `read` knows what to expect."""
        name = self._prefix + b"epoch"
        words = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)]
        add = words.append
        name = self._prefix + b"d"
        ask = b"$5\r\nHMGET\r\n$%d\r\n%b" % (len(name) + _GROUP_BYTES, name)
        # Names have few lengths, and directories few counts of them.
        sizes = set(map(len, chain.from_iterable(self._groups.values())))
        heads = {size: b"\r\n$%d\r\n" % (size - _GROUP_BYTES) for size in sizes}
        asks = {
            count: b"*%d\r\n%b" % (count + 2, ask) for count in set(map(len, self._groups.values()))
        }
        waiting = 0
        for group, keys in self._groups.items():
            count = len(keys)
            add(asks[count])
            add(group)
            for key in keys:
                add(heads[len(key)])
                add(key[_GROUP_BYTES:])
            add(b"\r\n")
            self._whole_bytes += len(b"*%d\r\n" % count)
            waiting += count
            if waiting >= _PART_KEYS:
                yield b"".join(words)
                words.clear()
                waiting = 0
        if words:
            yield b"".join(words)

    def read(self, answer: bytearray) -> list[bytes] | None:
        """As `Question.read`."""
        if not self._sound_bytes:
            if not answer.startswith(self._first):
                if self._first.startswith(answer):
                    return None
                raise Unexpected
            self._sound_bytes = len(self._first)
        sound = _SOUND.match(answer, self._sound_bytes)
        assert sound is not None  # as it is of nothing
        self._sound_bytes = sound.end()
        if self._sound_bytes < len(answer) and not _BEGUN.fullmatch(answer, self._sound_bytes):
            raise Unexpected
        missing_bytes = self._whole_bytes - len(answer)
        if missing_bytes < 0:
            raise Unexpected
        misses, rest = divmod(missing_bytes, _HIT_BYTES - len(_MISS))
        if rest or answer.count(_MISS) < misses:
            return None
        found = _VALUE.findall(answer, len(self._first))
        if len(found) != self._count or found.count(b"") != misses:
            return None
        return [value or NO_DIRENT for value in found] if misses else found
