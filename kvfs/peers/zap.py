"""Who may connect: zmq asks here (ZAP, its RFC 27) before a channel is open."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

import zmq

from kvfs.peers.keys import encode_key

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"  # one for each context, whose sockets it judges
DOMAIN = b"kvfs"
_VERSION = b"1.0"
_REQUEST_PARTS_MIN = 6  # version, request id, domain, address, identity, mechanism
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Verdict:
    code: bytes
    text: bytes
    user: str = ""


class Gatekeeper:
    """Lets known keys in; without keys anybody. One thread owns its socket."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", known: Collection[str] | None):
        self._known = known
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def close(self) -> None:
        self.socket.close()

    def answer(self) -> None:
        """Judge the one that waits."""
        parts = self.socket.recv_multipart(zmq.NOBLOCK)
        verdict = self._judge(parts)
        request_id = parts[1] if len(parts) > 1 else b""
        self.socket.send_multipart(
            [_VERSION, request_id, verdict.code, verdict.text, verdict.user.encode(), b""]
        )

    def _judge(self, parts: list[bytes]) -> _Verdict:
        if len(parts) < _REQUEST_PARTS_MIN or parts[0] != _VERSION:
            return _Verdict(b"500", b"not understood")
        address, mechanism, credentials = parts[3], parts[5], parts[6:]
        if self._known is None:
            return _Verdict(b"200", b"")
        if mechanism != b"CURVE" or len(credentials) != 1 or len(credentials[0]) != _KEY_BYTES:
            return _Verdict(b"400", b"a CURVE key is needed")
        key = encode_key(credentials[0])
        if key not in self._known:
            log.info("refused a peer at %s: its key %s is not known", address.decode(), key)
            return _Verdict(b"400", b"the key is not known")
        return _Verdict(b"200", b"", key)
