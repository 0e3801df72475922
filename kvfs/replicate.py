"""Which nodes keep a copy of a blob: a pure decision over who is there and who has it.

Every node puts all nodes in an order of its own for each digest (rendezvous hashing), the same on
every node. Copies go to the first in that order that have none; the first that has one sees to it,
so that not all do. When a node comes or goes, only those blobs are concerned that it is in front
for. Copies beyond the number are left to eviction.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import xxhash

from kvfs.settings.words import CopyRule


class HolderState(Enum):
    """In the order in which holders are worth naming."""

    PRESENT = "present"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that has the bytes of a digest. Of one that is gone nothing may be known but its
    id."""

    node_id: bytes
    state: HolderState
    host: str = ""
    address: str = ""
    store: str = ""
    is_this: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """The cluster as one node sees it. `staying`: who may be given copies, this node among them
    unless it is leaving. `counted`: whose copies count; those as well that went just now, who may
    be back soon."""

    me: bytes
    staying: frozenset[bytes]
    counted: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Shortage:
    """So many copies are `missing`; `targets` may take one each, the best first."""

    missing: int
    targets: tuple[bytes, ...]


def find_shortage(
    digest: bytes, wanted: int, holders: Collection[bytes], standing: Standing
) -> Shortage | None:
    """What this node has to do for a blob of which so many copies are wanted and `holders` have
    one; None when there are enough, another node sees to it, or nobody is left to ask."""
    missing = min(wanted, len(standing.staying)) - len(standing.counted.intersection(holders))
    if missing <= 0 or not is_in_charge(digest, holders, standing):
        return None
    targets = rank(digest, standing.staying.difference(holders))
    return Shortage(missing, targets) if targets else None


def is_in_charge(digest: bytes, holders: Iterable[bytes], standing: Standing) -> bool:
    """Whether this node is the first of those that have a blob and stay."""
    staying = standing.staying.intersection(holders)
    return bool(staying) and rank(digest, staying)[0] == standing.me


def rank(digest: bytes, node_ids: Iterable[bytes]) -> tuple[bytes, ...]:
    """Nodes in the order that a digest has for them."""
    return tuple(sorted(node_ids, key=lambda node_id: (_weight(digest, node_id), node_id)))


def _weight(digest: bytes, node_id: bytes) -> int:
    return xxhash.xxh3_64_intdigest(digest + node_id)


def wanted_copies(rules: Sequence[CopyRule], path: bytes) -> int:
    """How many nodes are to have a file, by the rule with the longest prefix of its path."""
    fitting = [rule for rule in rules if path.startswith(rule.prefix)]
    return max(fitting, key=lambda rule: len(rule.prefix)).copies if fitting else 1
