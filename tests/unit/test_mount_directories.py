"""Listing a directory while the kernel comes and goes."""

import errno
from collections.abc import Sequence

import pytest

from kvfs.errors import NamespaceError
from kvfs.meta.contract import Entry, Inode
from mount import directories
from mount.directories import Listed, OpenDirectory

INODE = Inode(2, 0o100644, 0, 0, 1, 0, 0, 0, 0)


class Names:
    """A directory of names that may change."""

    def __init__(self, *names: bytes) -> None:
        self.names = set(names)

    def list_after(self, cursor: bytes, limit: int) -> Sequence[Listed]:
        names = sorted(name for name in self.names if name > cursor)[:limit]
        return [Listed(name, Entry(name, INODE)) for name in names]


def take(directory: OpenDirectory, position: int, count: int) -> tuple[int, list[bytes]]:
    """What a kernel gets that has room for `count` names."""
    names: list[bytes] = []
    while page := directory.after(position):
        for at, listed in page:
            if len(names) == count:
                return position, names
            names.append(listed.entry.name)
            directory.note(at, listed.cursor)
            position = at
    return position, names


def test_dots_come_first() -> None:
    directory = OpenDirectory(5, 1, Names().list_after)
    assert directory.dots(0) == [(1, b".", 5), (2, b"..", 1)]
    assert directory.dots(1) == [(2, b"..", 1)]
    assert directory.dots(2) == directory.dots(9) == []
    assert directory.after(0) == directory.after(2) == []


def test_a_listing_goes_on_where_it_was() -> None:
    names = [b"%03d" % number for number in range(700)]
    directory = OpenDirectory(5, 1, Names(*names).list_after)
    seen: list[bytes] = []
    position = 0
    while True:
        position, got = take(directory, position, 97)
        if not got:
            break
        seen += got
    assert seen == names


def test_names_that_stay_are_seen_once_while_others_come_and_go() -> None:
    names = Names(*(b"%03d" % number for number in range(0, 600, 2)))
    directory = OpenDirectory(5, 1, names.list_after)
    position, seen = take(directory, 0, 100)
    names.names -= {b"000", b"198", b"200", b"202"}
    names.names |= {b"001", b"199", b"201"}
    _, rest = take(directory, position, 1000)
    assert rest[:3] == [b"199", b"201", b"204"]
    assert len(seen + rest) == len(set(seen + rest))


def test_seeking_back() -> None:
    names = [b"%03d" % number for number in range(300)]
    directory = OpenDirectory(5, 1, Names(*names).list_after)
    position, first = take(directory, 0, 120)
    take(directory, position, 100)
    assert take(directory, position, 100)[1] == names[120:220]
    assert take(directory, 0, 120)[1] == first


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "LISTED_NAMES_MAX", 100)
    names = [b"%04d" % number for number in range(1000)]
    directory = OpenDirectory(5, 1, Names(*names).list_after)
    position, seen = take(directory, 0, 1000)
    assert seen == names
    assert len(directory.cursors) <= 100
    assert directory.after(position) == []
    with pytest.raises(NamespaceError) as raised:
        directory.after(10)
    assert raised.value.code == errno.EINVAL
