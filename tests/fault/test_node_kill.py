"""kill -9 of a node at any moment: nothing partial is visible then, and the books are right."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from kvfs.chunk import ChunkHeader, TensorSpec, encode_header
from kvfs.client import Client
from kvfs.names import chunk_key, chunk_path, namespace_path
from tests.files import load_bytes, store_bytes
from tests.processes import allocated_bytes

WRITER = """
import os, sys, random
from pathlib import Path
from kvfs.chunk import ChunkHeader, TensorSpec, encode_header
from kvfs.client import Client
from kvfs.names import chunk_key, chunk_path, namespace_path
from kvfs.errors import KvfsError
from tests.files import store_bytes
rng = random.Random(int(sys.argv[2]))
done = open(sys.argv[3], "ab", buffering=0)
with Client(Path(sys.argv[1])) as client:
    for number in range(100000):
        path = b"d%d/f%d" % (number % 3, rng.randrange(40))
        data = rng.randbytes(rng.randrange(1, 300_000))
        try:
            store_bytes(client, path, data)
        except KvfsError:
            break
        done.write(b"x")
"""


@pytest.mark.parametrize("seed", range(4))
def test_killed_under_load(start_node, tmp_path: Path, seed: int) -> None:
    config = "max_bytes = '6MiB'\nmin_free = 0\n"
    node = start_node(config=config, allow="lost its file")
    done = tmp_path / "done"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(node.store), str(rank), str(done)])
        for rank in range(2)
    ]
    rng = random.Random(seed)
    wanted = rng.randrange(5, 60)
    end = time.monotonic() + 30
    while not done.exists() or done.stat().st_size < wanted:
        assert time.monotonic() < end
        time.sleep(0.001)
    node.kill()
    assert [writer.wait(timeout=30) for writer in writers] == [0, 0]

    node = start_node(store=node.store, config=config)
    with Client(node.store) as client:
        names = [b"d%d/f%d" % (d, f) for d in range(3) for f in range(40)]
        present = [n for n, s in zip(names, client.lookup(names), strict=True) if s is not None]
        for name in present:
            assert load_bytes(client, name) is not None
        collected = client.gc()
        assert collected["orphan_blobs"] == 0
        assert os.listdir(node.store / "staging") == []
        status = client.status()
        assert status["used_bytes"] == pytest.approx(allocated_bytes(node.store), rel=0.01)
        store_bytes(client, b"after", b"fine")
        assert load_bytes(client, b"after") == b"fine"


def test_a_client_killed_in_the_middle_of_storing(start_node) -> None:
    node = start_node()
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kvfs.client import Client\n"
        "client = Client(Path(sys.argv[1]))\n"
        "staged = client.stage([1 << 20] * 8)\n"
        "for item in staged: os.pwrite(item.fd, b'x' * 500_000, 0)\n"
        "print('staged', flush=True)\n"
        "sys.stdin.read()\n"
    )
    victim = subprocess.Popen(
        [sys.executable, "-c", program, str(node.store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert victim.stdout is not None and victim.stdout.readline() == b"staged\n"
    victim.kill()
    victim.communicate(timeout=30)
    with Client(node.store) as client:
        end = time.monotonic() + 10
        while client.status()["directories"][0]["staging_bytes"]:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert client.entries(b"") == []
    assert os.listdir(node.store / "staging") == []


def test_machine_crash_rebuilds_chunk_names(start_node) -> None:
    """The mark of a run under another boot id stands for a machine that went down."""
    node = start_node()
    payload = os.urandom(8192)
    header = ChunkHeader(
        model="org/model",
        fingerprint="0" * 32,
        key=chunk_key(b"\1" * 32, 0, 0),
        parent="",
        token_start=0,
        token_end=2,
        group=0,
        shard=0,
        engine="test",
        digest=xxhash.xxh3_128(payload).digest(),
        token_ids=(5, 6),
        tensors=(TensorSpec("layer", "U8", (8192,)),),
    )
    namespace = namespace_path(header.model, header.fingerprint)
    path = chunk_path(namespace, header.key)
    data = encode_header(header) + payload
    with Client(node.store) as client:
        store_bytes(client, path, data)
        store_bytes(client, b"plain", b"not a chunk")
    node.kill()
    (node.store / "meta" / "running").write_text("another boot")
    node = start_node(store=node.store, allow="the machine stopped")
    with Client(node.store) as client:
        assert load_bytes(client, path) == data
        assert [entry.info.key.decode() for entry in client.children(namespace, b"")] == [
            header.key
        ]
        assert client.lookup([b"plain"]) == [None]
        assert client.gc()["orphan_blobs"] == 0  # the start has freed what has no name
        assert client.status()["used_bytes"] == pytest.approx(allocated_bytes(node.store), abs=8192)
