"""Where the bytes of published files are, as a node tells its clients, and how that travels.

The answer about files is `[revision, [node id, ...], [file, ...]]`, and a file is None or
`[size, digest, directory, [tier number, ...], [place in the list of nodes, ...], address, ticket]`.
A tier is `[number, name, kind, path, url, endpoint, region, [limit, ...]]`. Credentials are in none
of this: who opens a tier has them from its own environment.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from kvfs.config import TIERS_MAX
from kvfs.errors import InvalidInput
from kvfs.settings.words import TierConfig, TierKind, TierLimits

NOWHERE = -1  # the directory of a file that has no copy here
DIRECTORIES_TOLD_MAX = 1024  # of a store; far more than a machine has disks
COMING = 0  # in the answer to `open`, in the place of a file that is still on its way here


@dataclass(frozen=True, slots=True)
class LocatedFile:
    """A published file, and the places that have its bytes; there are none while it is on its way
    here, or may be.

    The descriptor is the holder's to close. The ticket opens all of the file once, for a short
    time, at the first of the peers, to `kvfs.remote.RemoteReader`; of the others, and for parts,
    tickets are asked for.
    """

    size_bytes: int
    digest: bytes
    fd: int | None  # of the copy here
    directory: int  # the number of the store's, in which that lies
    tiers: tuple[int, ...]  # as `Client.tiers` numbers them
    peers: tuple[bytes, ...]  # nodes, by their ids
    address: str = ""  # `host:port`, of the first of them, where there is a ticket
    ticket: bytes = b""

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Located:
    """An answer of a node. With another `revision` its tiers may be others, or have other
    numbers."""

    revision: int
    files: list[LocatedFile | None]


@dataclass(frozen=True, slots=True)
class ToldTiers:
    """The tiers that a node has, by their numbers."""

    revision: int
    tiers: dict[int, TierConfig]


def pack_file(file: LocatedFile, nodes: dict[bytes, int]) -> list[Any]:
    """For an answer. `nodes` gets the places of those that it does not have yet."""
    places = [nodes.setdefault(node_id, len(nodes)) for node_id in file.peers]
    return [
        file.size_bytes, file.digest, file.directory, list(file.tiers), places, file.address,
        file.ticket,
    ]  # fmt: skip


def unpack_located(value: Any, descriptors: Sequence[int], asked: int) -> Located:
    """The answer about so many files, with the descriptors that came along. Raises `InvalidInput`
    for what is none, whose descriptors stay the caller's."""
    match value:
        case [int(revision), list(nodes), list(items)] if len(items) == asked:
            rest = iter(descriptors)
            files = [_unpack_file(item, nodes, rest) for item in items]
            if next(rest, None) is None:
                return Located(revision, files)
    raise _foreign("locate")


def _unpack_file(value: Any, nodes: list[Any], descriptors: Iterator[int]) -> LocatedFile | None:
    match value:
        case None:
            return None
        case [
            int(size_bytes), bytes(digest), int(directory), list(tiers), list(places),
            str(address), bytes(ticket),
        ]:  # fmt: skip
            fd = None if directory == NOWHERE else next(descriptors, None)
            is_told = directory == NOWHERE or (
                fd is not None and directory in range(DIRECTORIES_TOLD_MAX)
            )
            known = range(len(nodes))
            if is_told and _are_numbers(tiers, range(TIERS_MAX)) and _are_numbers(places, known):
                peers = tuple(nodes[place] for place in places)
                if all(type(peer) is bytes for peer in peers):
                    return LocatedFile(
                        size_bytes, digest, fd, directory, tuple(tiers), peers, address, ticket
                    )
    raise _foreign("locate")


def pack_tier(number: int, config: TierConfig) -> list[Any]:
    return [
        number, config.name, config.kind.value, "" if config.path is None else str(config.path),
        config.url, config.endpoint, config.region, list(astuple(config.limits)),
    ]  # fmt: skip


def unpack_tiers(value: Any) -> ToldTiers:
    """The answer about tiers. Raises `InvalidInput`."""
    match value:
        case [int(revision), list(items)] if len(items) <= TIERS_MAX:
            return ToldTiers(revision, dict(map(_unpack_tier, items)))
    raise _foreign("tiers")


def _unpack_tier(value: Any) -> tuple[int, TierConfig]:
    match value:
        case [
            int(number), str(name), str(word), str(path), str(url), str(endpoint), str(region),
            [int(), int(), float(), float(), float(), float()] as limits,
        ]:  # fmt: skip
            kind = next((kind for kind in TierKind if kind.value == word), None)
            if kind is not None and number in range(TIERS_MAX) and bool(path) != bool(url):
                return number, TierConfig(
                    name,
                    kind,
                    TierLimits(*limits),
                    path=Path(path) if path else None,
                    url=url,
                    endpoint=endpoint,
                    region=region,
                )
    raise _foreign("tiers")


def unpack_tickets(value: Any, asked: int) -> tuple[str, list[bytes | None]]:
    """The address and the tickets that a peer gave for so many ranges. Raises `InvalidInput`."""
    match value:
        case [str(address), list(tickets)] if len(tickets) == asked and all(
            ticket is None or type(ticket) is bytes for ticket in tickets
        ):
            return address, tickets
    raise _foreign("peer_tickets")


def unpack_sizes(value: Any, asked: int) -> list[int | None]:
    """The sizes that a peer told of so many blobs. Raises `InvalidInput`."""
    match value:
        case list(sizes) if len(sizes) == asked and all(
            size is None or type(size) is int for size in sizes
        ):
            return sizes
    raise _foreign("peer_sizes")


def _are_numbers(values: list[Any], known: range) -> bool:
    return all(type(value) is int and value in known for value in values)


def _foreign(operation: str) -> InvalidInput:
    return InvalidInput(operation, "the node's answer is none; client and node differ in version")


assert len(fields(TierLimits)) == 6, "what travels of a tier's limits"
