#!/usr/bin/env python3
"""Mutated messages against the codec between nodes, and against a server that serves.

usage: fuzz_peers.py [--frames 1000000] [--live 0.02] [--seed 1]
       fuzz_peers.py --at HOST:PORT --key FILE --server-key KEY --cluster NAME --digest HEX
                     [--seconds 10] [--seed 1]

Valid messages are changed (bits, cuts, repeats, parts of others, numbers at the edges) and thrown
at the codec, which must give a message or one `InvalidInput`; and a share of them at a live server,
on its channel, on its bulk stream, and as bare bytes on both ports. All the while an honest client
must be served the right bytes. Prints what happened as JSON; exit code 1 with the frame that broke
something. The same seed throws the same frames.

With `--at` all frames go to that node of a cluster, for so long, from a member that has turned bad:
`--key` is its key file. Whoever runs the cluster looks at what others read meanwhile.
"""

import argparse
import json
import random
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import zmq  # noqa: E402  (path first)

from kvfs.errors import InvalidInput, Unavailable  # noqa: E402
from kvfs.peers.client import PeerClient  # noqa: E402
from kvfs.peers.keys import KeyPair, load_pair  # noqa: E402
from kvfs.peers.messages import (  # noqa: E402
    PEER_PROTOCOL,
    Bytes,
    Code,
    Done,
    Health,
    HealthWanted,
    Hello,
    Hints,
    Lookup,
    Range,
    Read,
    Refusal,
    Sizes,
    Tickets,
    TicketsWanted,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.peer_rig import CLIENT_ID, CLUSTER, DirectorySource, PeerProcess  # noqa: E402

DEADLINE_S = 30.0
_EDGES = (b"\x00", b"\xff", b"\x7f", b"\x80", b"\x90", b"\xc0", b"\xc1", b"\xc4", b"\xc7", b"\xd4",
          b"\xd9", b"\xdc", b"\xdd", b"\xde", b"\xdf", b"\xff" * 4, b"\xff" * 8)  # fmt: skip
_BARE_EVERY = 200  # of the live frames, one goes bare to each port
_GREET_EVERY = 4  # of the live frames, one begins a session, so that many find one


@dataclass(slots=True)
class Report:
    """What happened."""

    seed: int
    frames: int = 0
    accepted: int = 0
    refused: int = 0
    live: int = 0
    answered: int = 0
    honest_reads: int = 0
    problems: list[str] = field(default_factory=list)


def seeds_of(digest: bytes) -> list[bytes]:
    """Valid messages of each kind."""
    node, nonce = b"n" * 16, b"o" * 16
    return [
        encode(1, Hello(PEER_PROTOCOL, CLUSTER, node, nonce)),
        encode(2, Lookup((digest,) * 3)),
        encode(3, TicketsWanted((Range(digest, 0, 10), Range(digest, 5, 100)))),
        encode(4, Read(digest, 1, 1000)),
        encode(5, Hints((digest,))),
        encode(6, HealthWanted()),
        encode(7, Welcome(node, nonce, "", 80)),
        encode(8, Sizes((None, 5))),
        encode(9, Tickets((None, b"t" * 32))),
        encode(10, Bytes(1000)),
        encode(11, Done()),
        encode(12, Health(1, 0.5, 2.0)),
        encode(13, Refusal(Code.BUSY, "no")),
    ]


def mutate(chance: random.Random, seeds: list[bytes]) -> bytes:
    """A valid message with one to four changes."""
    body = bytearray(chance.choice(seeds))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(body) + 1)
        kind = chance.randrange(7)
        if kind == 0 and at < len(body):
            body[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(body):
            body[at] = chance.randrange(256)
        elif kind == 2:
            body[at:at] = chance.choice(_EDGES)
        elif kind == 3:
            edge = chance.choice(_EDGES)
            body[at : at + len(edge)] = edge
        elif kind == 4:
            del body[at:]
        elif kind == 5:
            other = chance.choice(seeds)
            body[at:] = other[chance.randrange(len(other)) :]
        else:
            body[at:at] = bytes(body[:at])[-chance.randint(1, 64) :] * chance.randint(1, 8)
    return bytes(body)


def decode_any(body: bytes) -> bool:
    """Whether bytes are a message; AssertionError or whatever else the codec lets slip."""
    is_message = False
    for decode in (decode_request, decode_reply):
        try:
            number, message = decode(body)
        except InvalidInput as error:
            assert error.subject and error.reason
            continue
        assert decode(encode(number, message)) == (number, message)
        is_message = True
    return is_message


class HonestClient:
    """Reads a blob again and again in a thread of its own, and looks at each byte."""

    def __init__(self, port: int, digest: bytes, data: bytes, report: Report) -> None:
        self._client = PeerClient(f"127.0.0.1:{port}", None, None, CLIENT_ID, CLUSTER)
        self._digest = digest
        self._data = data
        self._report = report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_always)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(2 * DEADLINE_S)
        if self._thread.is_alive():
            self._report.problems.append("the honest client hangs")
        self._client.close()

    def read(self) -> None:
        buffer = bytearray(len(self._data))
        try:
            is_here = self._client.read_into(self._digest, 0, memoryview(buffer), DEADLINE_S)
            size = self._client.sizes([self._digest], DEADLINE_S)
        except Unavailable as error:
            self._report.problems.append(f"an honest client was not served: {error}")
            return
        if not is_here or buffer != self._data or size != [len(self._data)]:
            self._report.problems.append("an honest client was served other bytes")
        self._report.honest_reads += 1

    def _read_always(self) -> None:
        while not self._ended.is_set() and not self._report.problems:
            self.read()
            self._ended.wait(0.01)


class Thrower:
    """Throws frames at a live server: on a channel, on its bulk stream, and bare."""

    def __init__(
        self,
        address: tuple[str, int],
        chance: random.Random,
        report: Report,
        *,
        cluster: str = CLUSTER,
        keys: tuple[KeyPair, str] | None = None,
    ) -> None:
        """`keys`: the own pair, and the server's public key."""
        self._address = address
        self._keys = keys
        self._chance = chance
        self._report = report
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._connect()
        self._hello = encode(1, Hello(PEER_PROTOCOL, cluster, b"f" * 16, b"n" * 16))
        self.bulk_port = self._greet()

    def _connect(self) -> "zmq.Socket[bytes]":
        channel = self._context.socket(zmq.DEALER)
        channel.setsockopt(zmq.LINGER, 0)
        channel.setsockopt(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
        if self._keys is not None:
            pair, server_key = self._keys
            channel.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            channel.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
            channel.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        host, port = self._address
        channel.connect(f"tcp://{host}:{port}")
        return channel

    def _greet(self) -> int:
        self._socket.send(self._hello)
        assert self._socket.poll(int(DEADLINE_S * 1000)), "the server does not answer"
        _, reply = decode_reply(self._socket.recv_multipart()[0])
        assert isinstance(reply, Welcome)
        return reply.bulk_port

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def throw(self, body: bytes) -> None:
        self._report.live += 1
        if self._report.live % _GREET_EVERY == 0:
            self._socket.send(self._hello)
        parts = [body] if self._chance.random() < 0.95 else [body, body[:3], b""]
        try:
            self._socket.send_multipart(parts)
        except zmq.Again:
            self._report.problems.append("the server reads no more")
            return
        if self._report.live % _BARE_EVERY == 0:
            self._throw_bare(body, self._address[1])
            self._throw_bare(body, self.bulk_port)
        while self._socket.poll(0):
            self._socket.recv_multipart()
            self._report.answered += 1

    def _throw_bare(self, body: bytes, port: int) -> None:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" if self._chance.random() < 0.5 else b""
        try:
            place = (self._address[0], port)
            with socket.create_connection(place, DEADLINE_S) as connection:
                connection.sendall(greeting + body)
        except ConnectionError:  # it hung up on us, as it may
            pass


def fuzz(frames: int, live_share: float, seed: int) -> Report:
    chance = random.Random(seed)
    report = Report(seed)
    with tempfile.TemporaryDirectory(prefix="kvfs-fuzz-") as scratch:
        source = DirectorySource(Path(scratch))
        data = chance.randbytes(200_000)
        digest = source.add(data)
        seeds = seeds_of(digest)
        peer = PeerProcess(Path(scratch))
        try:
            honest = HonestClient(peer.port, digest, data, report)
            thrower = Thrower(("127.0.0.1", peer.port), chance, report)
            honest.read()
            try:
                _throw_all(frames, live_share, chance, seeds, thrower, report)
            finally:
                thrower.close()
                honest.read()
                honest.close()
        finally:
            if peer.stop():
                report.problems.append("the server did not end well")
    return report


def _throw_all(
    frames: int,
    live_share: float,
    chance: random.Random,
    seeds: list[bytes],
    thrower: Thrower,
    report: Report,
) -> None:
    for _ in range(frames):
        body = mutate(chance, seeds)
        report.frames += 1
        try:
            is_message = decode_any(body)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what we look for)
            report.problems.append(f"{type(error).__name__}: {error}: {body.hex()}")
            return
        report.accepted += is_message
        report.refused += not is_message
        if chance.random() < live_share:
            thrower.throw(body)
        if report.problems:
            return


def fuzz_member(options: argparse.Namespace) -> Report:
    """Throw frames at a node of a cluster until the time is over."""
    chance = random.Random(options.seed)
    report = Report(options.seed)
    host, _, port = options.at.rpartition(":")
    keys = (load_pair(options.key), options.server_key) if options.key else None
    thrower = Thrower((host, int(port)), chance, report, cluster=options.cluster, keys=keys)
    seeds = seeds_of(bytes.fromhex(options.digest))
    end_s = time.monotonic() + options.seconds
    try:
        while time.monotonic() < end_s and not report.problems:
            report.frames += 1
            thrower.throw(mutate(chance, seeds))
    finally:
        thrower.close()
    return report


def main() -> int:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--at", help="a node of a cluster, host:port")
    parser.add_argument("--key", type=Path, help="key file of a member")
    parser.add_argument("--server-key", default="", help="public key of that node")
    parser.add_argument("--cluster", default=CLUSTER, help="its name")
    parser.add_argument("--digest", default="00" * 16, help="of a blob that the node has")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--live", type=float, default=0.02, help="share thrown at a live server")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin_s = time.monotonic()
    if options.at:
        report = fuzz_member(options)
    else:
        report = fuzz(options.frames, options.live, options.seed)
    spent_s = round(time.monotonic() - begin_s, 1)
    print(json.dumps({**asdict(report), "seconds": spent_s}, indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
