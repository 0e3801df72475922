"""Who is in a cluster: a lease of each node on the metadata server, renewed while it lives.

A node whose lease has ended is asked for nothing; it is a member again with its next renewal. The
clocks of the nodes do not matter: leases end by the server's.
"""

import logging
from dataclasses import dataclass

import msgpack

from kvfs.config import CLUSTER_LEASE_S
from kvfs.errors import Unavailable
from kvfs.meta.server import MetaServer

TAKEN = (
    "a node with the id of this store is a member already: this is a copy of its directory; start"
    " on a new, empty one"
)
_WORDS = (str, str, str, str, int, str, bool)  # what each field of a member is, as `_pack` has them
_WORDS_MIN = 5  # which all versions say
_NONE = -1  # the number of a list that nobody has seen

Endpoint = tuple[bytes, str, str, int]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A node as it describes itself."""

    node_id: bytes
    address: str  # `host:port` where it serves peers
    public_key: str  # empty: it serves whoever asks
    host: str
    store: str
    started_ns: int
    boot_id: str = ""  # of its machine
    is_leaving: bool = False  # it takes nothing any more, and moves to others what only it has

    @property
    def endpoint(self) -> Endpoint:
        """What is the same as long as connections to it may live."""
        return self.node_id, self.address, self.public_key, self.started_ns


class Members:
    """The list as one node knows it. Blocks for a round trip: for a thread, one at a time."""

    def __init__(self, server: MetaServer, me: Member, lease_s: float = CLUSTER_LEASE_S) -> None:
        self._server = server
        self._me = me
        self._lease_s = lease_s
        self._is_new = True
        self.was_away = False  # before the last renewal, so that its lease had ended
        self._number = _NONE  # of the list
        self._list: tuple[Member, ...] = ()
        self._present: dict[bytes, Member] = {}
        self._unread: dict[bytes, bytes] = {}  # what members say that means nothing here

    def describe(self, me: Member) -> None:
        """From the next renewal on, this is what the node says of itself."""
        assert me.endpoint == self._me.endpoint
        self._me = me

    def renew(self) -> tuple[Member, ...]:
        """Be a member for another while; all who are, with this node. Raises `Unavailable`, also
        for a node that is new here while another one is there under its id: unless that was one of
        the same machine and directory, which has died, since the directory has one node."""
        return self._say(_pack(self._me))

    def leave(self) -> None:
        """Be none any more. Raises `Unavailable`."""
        self._say(b"")

    def _say(self, words: bytes) -> tuple[Member, ...]:
        number, *rest = self._server.renew_lease(
            words, self._lease_s, self._number, is_new=self._is_new
        )
        if number < 0:
            raise Unavailable(TAKEN)
        count, *listed = rest
        self.was_away = bool(listed and listed[0]) and self._number != _NONE
        if listed:
            self._change(*listed)
        # Where a server lost its last words, as one that took another's place may, a list may lack
        # what no change will name again: then all of it is asked for.
        is_all = len(self._present) + len(self._unread) == count
        self._number = number if is_all else _NONE
        self._is_new = False
        return self._list

    def _change(self, is_whole: int, told: list[bytes]) -> None:
        before = dict(self._unread)
        if is_whole:
            self._present.clear()
            self._unread.clear()
        ids = iter(told)
        for node_id, said in zip(ids, ids, strict=True):
            self._unread.pop(node_id, None)
            member = _unpack(node_id, said) if said else None
            if member is not None:
                self._present[node_id] = member
                continue
            self._present.pop(node_id, None)
            if said:
                self._unread[node_id] = said
                if before.get(node_id) != said:
                    log.warning(
                        "node %s says of itself what this version of kvfs does not understand: it"
                        " is asked for nothing",
                        node_id.hex(),
                    )
        self._list = tuple(self._present.values())


def is_taken(server: MetaServer, node_id: bytes, store: str, boot_id: str) -> bool:
    """Whether a node is a member under this id that is not of this directory and machine. Raises
    `Unavailable`."""
    words = server.member_words(node_id)
    if words is None:
        return False
    there = _unpack(node_id, words)  # not understood: it may be anybody, also another node
    return there is None or (there.store, there.boot_id) != (store, boot_id)


def _pack(member: Member) -> bytes:
    packed = msgpack.packb(
        [
            member.address,
            member.public_key,
            member.host,
            member.store,
            member.started_ns,
            member.boot_id,
            member.is_leaving,
        ]
    )
    assert isinstance(packed, bytes)
    return packed


def _unpack(node_id: bytes, said: bytes) -> Member | None:
    """None for words that another version may understand; what follows those known here is a later
    version's."""
    try:
        words = msgpack.unpackb(said)
    except ValueError:
        return None
    if not isinstance(words, list):
        return None
    known = words[: len(_WORDS)]
    is_sound = all(isinstance(word, kind) for word, kind in zip(known, _WORDS, strict=False))
    return Member(node_id, *known) if is_sound and len(known) >= _WORDS_MIN else None
