#!/usr/bin/env python3
"""What one node reads from another, against a bare TCP stream on the same network.

usage: bench_peers.py [--rates 0,10000,1000] [--rounds 7] [--mib 243] [--range-mib 16] [--json]

Between two network namespaces, in turns, one file that the server has in memory, in ranges:
  raw        sendfile to recv_into on one kept TCP stream, all ranges asked for at once
  plain      PeerClient.read_many without keys
  keys       the same with CURVE keys; the bytes go beside the channel
  encrypted  the same with encrypt_bulk: all bytes inside the CURVE channel
at each rate in Mbit/s (0: as fast as the machine can). Prints MiB/s (medians), and the ratio to raw
(median of the pairs) with the smallest and the largest. The bytes are compared after each way's
first turn. Root only; everything that it makes is removed.
"""

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from kvfs.config import MIB  # noqa: E402  (path first)
from kvfs.digest import digest_of  # noqa: E402
from kvfs.file_io import allocate  # noqa: E402
from kvfs.peers.client import PeerClient  # noqa: E402
from kvfs.peers.keys import Keys, load_pair  # noqa: E402
from scripts.ending import clean_up_on_sigterm  # noqa: E402
from scripts.net_rig import Network, network  # noqa: E402
from scripts.peer_rig import CLIENT_ID, CLUSTER, PeerProcess  # noqa: E402

WAYS = ("raw", "plain", "keys", "encrypted")
DEADLINE_S = 300.0
_REQUEST = struct.Struct("<QQ")  # offset, length


# The bare stream ----------------------------------------------------------------------------------
def serve_raw(address: str, file: Path) -> None:
    """Serve ranges of a file, to one client after the other, until it is killed."""
    fd = os.open(file, os.O_RDONLY)
    with socket.create_server((address, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
                    at, length = _REQUEST.unpack(request)
                    end = at + length
                    while at < end:
                        at += os.sendfile(connection.fileno(), fd, at, end - at)


def raw_reader(
    address: str, port: int, ranges: Sequence[tuple[int, memoryview]]
) -> Callable[[], None]:
    connection = socket.create_connection((address, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read() -> None:
        asked = [_REQUEST.pack(offset, len(memory)) for offset, memory in ranges]
        connection.sendall(b"".join(asked))
        for _, memory in ranges:
            done = 0
            while done < len(memory):
                count = connection.recv_into(memory[done:], 0, socket.MSG_WAITALL)
                assert count, "the raw server hung up"
                done += count

    return read


# The client, a process in its namespace -----------------------------------------------------------
def work(options: argparse.Namespace) -> None:
    """For each line on standard input, the name of a way, print how many seconds it took."""
    plan = json.loads(options.worker)
    memory = allocate(plan["size"])[: plan["size"]]
    memory[::4096] = bytes(len(memory[::4096]))  # every page is there
    step = plan["range_bytes"]
    ranges = [(at, memory[at : at + step]) for at in range(0, len(memory), step)]
    digest = bytes.fromhex(plan["digest"])
    keys = Keys(load_pair(Path(plan["pair"])))
    readers = {
        "raw": raw_reader(plan["address"], plan["ports"]["raw"], ranges),
        "plain": peer_reader(plan, "plain", None, digest, ranges),
        "keys": peer_reader(plan, "keys", keys, digest, ranges),
        "encrypted": peer_reader(plan, "encrypted", keys, digest, ranges),
    }
    for line in sys.stdin:
        way, is_checked = line.split()
        begin_s = time.perf_counter()
        readers[way]()
        spent_s = time.perf_counter() - begin_s
        if is_checked == "check":
            assert digest_of(memory) == digest, f"{way}: other bytes came"
            memory[:] = bytes(len(memory))
        print(spent_s, flush=True)


def peer_reader(
    plan: dict[str, object],
    way: str,
    keys: Keys | None,
    digest: bytes,
    ranges: Sequence[tuple[int, memoryview]],
) -> Callable[[], None]:
    ports = plan["ports"]
    assert isinstance(ports, dict)
    client = PeerClient(
        f"{plan['address']}:{ports['plain' if keys is None else 'keys']}",
        keys,
        str(plan["server_key"]) if keys is not None else None,
        CLIENT_ID,
        CLUSTER,
        encrypt_bulk=way == "encrypted",
    )
    wants = [(digest, offset, memory) for offset, memory in ranges]

    def read() -> None:
        assert all(client.read_many(wants, DEADLINE_S)), "the peer has it not"

    return read


# The measurement ----------------------------------------------------------------------------------
class Worker:
    """The client's process."""

    def __init__(self, prefix: Sequence[str], plan: dict[str, object]) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__, "--worker", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def spend_s(self, way: str, *, check: bool) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{way} {'check' if check else 'time'}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the client ended while it read the {way} way"
        return float(line)


def start_raw(stack: ExitStack, prefix: Sequence[str], address: str, file: Path) -> int:
    command = [*prefix, sys.executable, __file__, "--serve-raw", address, str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return int(process.stdout.readline())


def start_all(stack: ExitStack, net: Network, scratch: Path, options: argparse.Namespace) -> Worker:
    """The servers in the first host, and the client in the second."""
    size = options.mib * MIB
    data = os.urandom(size)
    digest = digest_of(data)
    blobs = scratch / "blobs"
    blobs.mkdir()
    (blobs / digest.hex()).write_bytes(data)
    del data
    server, client = (load_pair(scratch / name) for name in ("server", "client"))
    (scratch / "known").write_text(f"{client.public} client\n")
    host, other = net.hosts
    place = {"address": f"{host.address}:0", "prefix": host.prefix}
    plain = PeerProcess(blobs, ["--insecure"], **place)
    stack.callback(plain.stop)
    words = ["--pair", str(scratch / "server"), "--known", str(scratch / "known")]
    keyed = PeerProcess(blobs, words, **place)
    stack.callback(keyed.stop)
    raw_port = start_raw(stack, host.prefix, host.address, blobs / digest.hex())
    plan: dict[str, object] = {
        "address": host.address,
        "ports": {"raw": raw_port, "plain": plain.port, "keys": keyed.port},
        "size": size,
        "range_bytes": options.range_mib * MIB,
        "digest": digest.hex(),
        "pair": str(scratch / "client"),
        "server_key": server.public,
    }
    return stack.enter_context(Worker(other.prefix, plan))


def measure(worker: Worker, rounds: int, ways: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each way in each round; who begins changes with the round."""
    for way in ways:
        worker.spend_s(way, check=True)
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        first = turn % len(ways)
        for way in (*ways[first:], *ways[:first]):
            spent[way].append(worker.spend_s(way, check=False))
    return spent


def row(rate: int, way: str, mib: int, spent: dict[str, list[float]]) -> dict[str, object]:
    ratios = [raw / ours for raw, ours in zip(spent["raw"], spent[way], strict=True)]
    return {
        "mbit": rate,
        "way": way,
        "mib_s": round(mib / statistics.median(spent[way])),
        "ratio": round(statistics.median(ratios), 3),
        "smallest": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
    }


def line(r: dict[str, object]) -> str:
    rate = r["mbit"] or "none"
    ratio = f"{r['ratio']} ({r['smallest']} to {r['largest']})"
    return f"{rate!s:>6} {r['way']:10} {r['mib_s']:6}  {ratio}"


def main() -> None:
    clean_up_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rates", type=lambda text: [int(n) for n in text.split(",")], default=[0, 10_000, 1_000]
    )
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=243)
    parser.add_argument("--range-mib", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--serve-raw", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_raw:
        serve_raw(options.serve_raw[0], Path(options.serve_raw[1]))
        return
    if options.worker:
        work(options)
        return
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as scratch, network(2) as net:
        for rate in options.rates:
            net.limit(rate or None)
            with ExitStack() as stack:
                (base := Path(scratch) / str(rate)).mkdir()
                worker = start_all(stack, net, base, options)
                spent = measure(worker, options.rounds, options.ways)
            rows += [row(rate, way, options.mib, spent) for way in options.ways]
            print(*map(line, rows[-len(options.ways) :]), sep="\n", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print("Mbit/s way         MiB/s  ratio to raw (smallest to largest)")
    print(*map(line, rows), sep="\n")


if __name__ == "__main__":
    main()
