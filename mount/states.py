"""What an open means, by what is open already: a table without I/O.

A *version* is what one kernel inode shows: one run of bytes with one page cache. Everyone who has
opened the same version sees the same bytes, as POSIX says. What POSIX leaves to chance is settled
by giving new bytes a new version, that is, a new inode number:

- Who opened a published file for reading keeps its bytes, also when it is overwritten in place.
- Who opens a file while it is being written sees the bytes as they are written.

So a version is in one of these states, and an open does what the table says:

| state  | the version                             | read   | write  | write, truncating |
|--------|-----------------------------------------|--------|--------|-------------------|
| IDLE   | nobody has it open                      | OPEN   | ADOPT  | EMPTY             |
| READ   | readers only: the bytes stay            | JOIN   | MOVE   | MOVE              |
| WRITE  | a writer is there, nothing has changed  | JOIN   | JOIN   | EMPTY             |
| STAGED | changed bytes are in a stage            | JOIN   | JOIN   | EMPTY             |
| OLD    | its names show a newer version          | STALE  | STALE  | STALE             |

OPEN opens the blob, or what comes from another node to be it; where that fails, the version becomes
OLD. ADOPT notes a writer; the bytes are copied when the first write comes. EMPTY
takes an empty stage, or empties the one that is there. MOVE gives the file a new version, which the
writer gets: the request fails with ESTALE, on which the kernel looks the name up again, finds the
new number and opens that; the readers keep the old one. STALE: the same, with no new version to
make. Since the kernel repeats a request once, one that comes back (`is_repeated`) must not be
sent away again: MOVE becomes JOIN (or EMPTY), and a read of an OLD version that someone still has
open becomes JOIN. For the same reason a file gets no newer version while a request that was sent
back is on its way to it: then MOVE becomes JOIN (or EMPTY) for others as well.

The kernel's page cache may be kept at an open whenever the version was open, since all changes went
through that cache, and at OPEN and ADOPT if the digest is the one that was cached last. Who opens
for writing only goes past the cache; the kernel then drops the pages that it writes over, and is
told again when somebody reads at the same time.

Other transitions: the first write (or truncation) makes WRITE to STAGED by copying; a publication
makes STAGED to WRITE; the last writer's release makes WRITE to READ or IDLE; the last reader's
release makes READ to IDLE, and an OLD version vanish. What another node of a cluster does to a file
makes READ to OLD, and WRITE too if its bytes were read or written here; else WRITE gets the new
bytes. An OLD version that is written to is published over what the other node wrote: the last close
wins.
"""

import enum
import os


class State(enum.Enum):
    """Of a version; see the module's docstring."""

    IDLE = enum.auto()
    READ = enum.auto()
    WRITE = enum.auto()
    STAGED = enum.auto()
    OLD = enum.auto()


class Access(enum.Enum):
    """What an open asks for."""

    READ = enum.auto()
    WRITE = enum.auto()
    TRUNCATE = enum.auto()  # write, and empty it first


class Opening(enum.Enum):
    """What an open does; see the module's docstring."""

    OPEN = enum.auto()
    ADOPT = enum.auto()
    EMPTY = enum.auto()
    JOIN = enum.auto()
    MOVE = enum.auto()
    STALE = enum.auto()


def access_of(flags: int) -> Access:
    """What the flags of an open ask for."""
    if flags & os.O_TRUNC:
        return Access.TRUNCATE
    return Access.READ if flags & os.O_ACCMODE == os.O_RDONLY else Access.WRITE


_TABLE = {
    State.IDLE: (Opening.OPEN, Opening.ADOPT, Opening.EMPTY),
    State.READ: (Opening.JOIN, Opening.MOVE, Opening.MOVE),
    State.WRITE: (Opening.JOIN, Opening.JOIN, Opening.EMPTY),
    State.STAGED: (Opening.JOIN, Opening.JOIN, Opening.EMPTY),
    State.OLD: (Opening.STALE, Opening.STALE, Opening.STALE),
}
_COLUMNS = (Access.READ, Access.WRITE, Access.TRUNCATE)


def decide_open(
    state: State, access: Access, *, is_open: bool, is_repeated: bool, is_awaited: bool
) -> Opening:
    """What an open does. `is_open`: someone has the version open; decides for OLD only.
    `is_awaited`: a request that was sent back is on its way to the file."""
    opening = _TABLE[state][_COLUMNS.index(access)]
    if opening is Opening.MOVE and (is_repeated or is_awaited):
        return Opening.EMPTY if access is Access.TRUNCATE else Opening.JOIN
    if is_repeated and opening is Opening.STALE and access is Access.READ and is_open:
        return Opening.JOIN
    return opening


def keeps_cache(opening: Opening, *, is_same_digest: bool) -> bool:
    """Whether the kernel may keep the pages that it has."""
    return opening is Opening.JOIN or (opening in (Opening.OPEN, Opening.ADOPT) and is_same_digest)
