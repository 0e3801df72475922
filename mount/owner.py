"""The process that owns a store: waiting for its end, and taking its place.

A mount may find its store owned by a node that is about to go: by one whose mount was just taken
down or killed, or by one that a client started because nobody served the store. The first is
waited for, the second is asked to leave, since its clients find the mount's node as well. Any other
owner stays, and the mount is refused.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.address import node_address
from kvfs.client import Client
from kvfs.config import STORE_HANDOVER_S
from kvfs.errors import KvfsError
from kvfs.holder import process_state
from kvfs.mark import is_owned

log = logging.getLogger(__name__)

_PEER = struct.Struct("3i")  # pid, uid, gid
_POLL_S = 0.05
_ANSWER_DEADLINE_S = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a node says of itself. `mountpoint` stays when the mount is detached or going."""

    mountpoint: str | None
    is_spare: bool  # a client started it, for want of another
    pid: int


class Owner:
    """The process that serves a store, if one does, to wait for its end."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._pidfd = -1
        self._pid = 0
        self._takes_no_word = False  # it is stopped, and its socket's queue is full
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(_ANSWER_DEADLINE_S)
            try:
                with node_address(store) as address:
                    connection.connect(address)
                who = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                self._pid = _PEER.unpack(who)[0]
                self._pidfd = os.pidfd_open(self._pid)
            except BlockingIOError:
                self._takes_no_word = True
            except OSError:
                pass  # nobody serves it, or not for us

    def close(self) -> None:
        """Let go of it."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def shown(self) -> str:
        """The process in words, with what to do about one that is stopped."""
        if self._takes_no_word:
            return "its process (which takes no connection: is it stopped?)"
        if self._pidfd < 0:
            return "its process"
        hint = f" (which is stopped: kill -CONT {self._pid})" if self._state() in ("T", "t") else ""
        return f"its process {self._pid}{hint}"

    @property
    def is_killed(self) -> bool:
        """Whether its main thread has ended, and something keeps the others from it."""
        return self._pidfd >= 0 and self._state() == "Z"

    def _state(self) -> str:
        """Of its main thread, as in proc(5); empty when that is not known."""
        return process_state(self._pid)

    def ask_to_leave(self) -> None:
        """SIGTERM, if it is there and ours to ask."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def wait_gone(self, deadline_s: float) -> bool:
        """False when it still runs at the deadline."""
        end_s = time.monotonic() + deadline_s
        while self._takes_no_word and is_owned(self._store):
            if time.monotonic() >= end_s:
                return False
            time.sleep(_POLL_S)
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], deadline_s)[0])


def wait_free(
    store: Path, mounted_stores: Callable[[], Sequence[Path]], deadline_s: float = STORE_HANDOVER_S
) -> None:
    """Return when nobody owns a store, or at once when who does is to stay, or at the deadline:
    whoever then takes the store is told whether it is free."""
    has_asked = False
    end_s = time.monotonic() + deadline_s
    while is_owned(store) and time.monotonic() < end_s:
        if store in mounted_stores():
            return
        node = describe(store)
        if node is not None and node.mountpoint is None:
            if not node.is_spare:
                return
            if not has_asked:
                log.info("the node that a client started for %s gives its place up", store)
                owner = Owner(store)
                owner.ask_to_leave()
                owner.close()
                has_asked = True
        time.sleep(_POLL_S)


def describe(store: Path) -> Served | None:
    """How a store is served; None when its node does not answer (yet, or any more)."""
    try:
        with Client(store, deadline_s=_ANSWER_DEADLINE_S) as client:
            status = client.status()
    except KvfsError:
        return None
    return Served(status.get("mountpoint"), status.get("idle_exit_s") is not None, status["pid"])
