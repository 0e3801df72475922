"""All places from which a process reads a node's files, as the tiers of one transfer: the store's
directories, the node's tiers, other nodes."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from kvfs.client import Client
from kvfs.client_files import OpenFile, close_all
from kvfs.config import READER_PEERS_MAX, TIERS_MAX
from kvfs.errors import QueueFull
from kvfs.located import DIRECTORIES_TOLD_MAX, Located, LocatedFile, ToldTiers
from kvfs.peers.messages import Range
from kvfs.reader.configured import ConfiguredTiers
from kvfs.reader.tickets import NodeReferrer
from kvfs.remote import RemoteReader
from kvfs.settings.words import TIER_LIMITS, TierKind, TierLimits
from kvfs.tiers.handed import HandedFile, HandedTier
from kvfs.tiers.peer import PeerTier, ReferredPeer
from kvfs.transfer.runner import Transfer

log = logging.getLogger(__name__)

STORE, PEERS = "store", "peers"

# Numbers of tiers: those of the configuration have the node's.
_DIRECTORY_FIRST = TIERS_MAX
_PEER_FIRST = _DIRECTORY_FIRST + DIRECTORIES_TOLD_MAX


class Placed:
    """A file that can be read from `tiers` of the transfer until it is released."""

    __slots__ = ("_handed", "_is_released", "_tier", "file", "tiers")

    def __init__(
        self,
        file: LocatedFile,
        tiers: tuple[int, ...],
        tier: HandedTier | None,
        handed: HandedFile | None,
    ) -> None:
        self.file = file
        self.tiers = tiers
        self._tier = tier  # of the store's, which has it by `handed`
        self._handed = handed
        self._is_released = False

    @property
    def is_here(self) -> bool:
        """Whether the store has a copy."""
        return self._handed is not None

    @property
    def is_short(self) -> bool:
        """Whether that has fewer bytes than it should."""
        return self._handed is not None and self._handed.is_short

    @property
    def error(self) -> OSError | None:
        """Why it could not be read."""
        return None if self._handed is None else self._handed.error

    def release(self) -> None:
        """It is not read any more. Once is enough."""
        if self._tier is not None and self._handed is not None and not self._is_released:
            self._is_released = True
            self._tier.take_back(self._handed)


class Places:
    """Adds tiers to a transfer as files turn out to lie on them. Thread-safe."""

    def __init__(
        self,
        transfer: Transfer,
        ask_tiers: Callable[[], ToldTiers | None],
        ticket_client: Client,
        complain: Callable[[bytes], None],
        directory_limits: TierLimits = TIER_LIMITS[TierKind.NVME],
    ) -> None:
        """`ask_tiers`: the node's, or None when it does not say. `ticket_client` asks the node
        about others, which may take long; it is closed with this. `complain` is told of digests
        whose copy in the store is bad; it must not block."""
        self._transfer = transfer
        self._ticket_client = ticket_client
        self._complain = complain
        self._directory_limits = directory_limits
        self._remote = RemoteReader()
        self._configured = ConfiguredTiers(ask_tiers, transfer.add_tier, transfer.remove_tier)
        self._lock = threading.Lock()
        self._directories: dict[int, HandedTier] = {}
        self._peers: OrderedDict[bytes, tuple[int, NodeReferrer]] = OrderedDict()  # last used last
        self._next_peer = _PEER_FIRST

    def place(self, located: Located, end_s: float) -> list[Placed | None]:
        """Have files read; None stays None. What only a tier has that is not open yet waits for
        that, until a time at most. Descriptors are the result's from now on."""
        placed: list[Placed | None] = []
        try:
            self._open_tiers(located, end_s)
            for file in located.files:
                placed.append(None if file is None else self._place(file))
        except BaseException:
            for place in placed:
                if place is not None:
                    place.release()
            close_all(located.files[len(placed) :])
            raise
        return placed

    def _open_tiers(self, located: Located, end_s: float) -> None:
        """Those that have some of the files; what nobody else has is worth waiting for."""
        files = [file for file in located.files if file is not None and file.tiers]
        if files:
            self._configured.learn(located.revision)
            self._configured.wait_open({n for file in files for n in file.tiers}, 0.0)
            alone = {n for f in files if f.fd is None and not f.peers for n in f.tiers}
            self._configured.wait_open(alone, end_s)

    def place_here(self, file: OpenFile) -> Placed:
        """As `place`, from the copy in the store only."""
        here = LocatedFile(file.size_bytes, file.digest, file.fd, file.directory, (), ())
        return self._place(here)

    def source_of(self, number: int) -> str:
        """What kind of place a tier of the transfer is, for who counts: `STORE`, `PEERS`, or empty
        for one of the node's configuration, which has a name of its own."""
        if number < _DIRECTORY_FIRST:
            return ""
        return STORE if number < _PEER_FIRST else PEERS

    def close(self) -> None:
        """Let all go. Reads under way end or fail."""
        self._configured.close()
        self._remote.close()
        self._ticket_client.close()

    def _place(self, file: LocatedFile) -> Placed:
        tiers = self._configured.are_open(file.tiers)
        for node_id in file.peers:
            has_ticket = bool(file.ticket) and node_id == file.peers[0]
            peer = self._peer(node_id, is_needed=has_ticket)
            if peer is not None:
                number, referrer = peer
                tiers += (number,)
                if has_ticket:
                    whole = Range(file.digest, 0, file.size_bytes)
                    referrer.keep(whole, file.address, file.ticket)
        if file.fd is None:
            return Placed(file, tiers, None, None)
        try:
            number, tier = self._directory(file.directory)
        except QueueFull as error:
            log.info("kvfs: directory %d is not read from: %s", file.directory, error)
            file.close()
            return Placed(file, tiers, None, None)
        handed = tier.hand(file.digest, file.size_bytes, file.fd)  # last: it owns the descriptor
        return Placed(file, (*tiers, number), tier, handed)

    def _directory(self, number: int) -> tuple[int, HandedTier]:
        """One of the store's as a tier. Raises `QueueFull` where there are too many tiers."""
        with self._lock:
            tier = self._directories.get(number)
            if tier is None:
                tier = HandedTier(f"store {number}", self._directory_limits, self._complain)
                self._transfer.add_tier(_DIRECTORY_FIRST + number, tier)
                self._directories[number] = tier
        return _DIRECTORY_FIRST + number, tier

    def _peer(self, node_id: bytes, *, is_needed: bool) -> tuple[int, NodeReferrer] | None:
        """A node as a tier. There are a few at a time: for one that is needed the one goes that was
        not used for the longest time."""
        with self._lock:
            found = self._peers.get(node_id)
            if found is not None:
                self._peers.move_to_end(node_id)
                return found
            if len(self._peers) >= READER_PEERS_MAX:
                if not is_needed:
                    return None
                _, (number, _) = self._peers.popitem(last=False)
                self._transfer.remove_tier(number)
            referrer = NodeReferrer(node_id, self._ticket_client)
            limits = TIER_LIMITS[TierKind.PEER]
            tier = PeerTier(node_id.hex(), limits, ReferredPeer(referrer, self._remote))
            number = self._next_peer
            self._next_peer += 1
            try:
                self._transfer.add_tier(number, tier)
            except QueueFull as error:
                log.info("kvfs: node %s is not read from: %s", node_id.hex(), error)
                return None
            self._peers[node_id] = number, referrer
            return number, referrer
