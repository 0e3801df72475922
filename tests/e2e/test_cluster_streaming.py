"""Reading a file that only another node has while it is fetched: real mounts in network namespaces,
on cables that are slow until a test has seen what it wants to see."""

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.config import MIB
from kvfs.digest import digest_of
from scripts.cluster_rig import Node, Rig, cluster

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse"),
]
SOON_S = 30.0
FILE_BYTES = 24 * MIB + 5
SLOW_MBIT = 30  # 7 s for a file
CRAWL_MBIT = 2


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with cluster(3, tmp_path_factory.mktemp("cluster")) as rig:
        yield rig


@pytest.fixture
def rig(started: Rig) -> Iterator[Rig]:
    """All nodes are there, also after a test that ended half-way."""
    yield started
    for node in started.nodes:
        if node.process is None:
            node.clear()
            node.start()


@contextmanager
def slowed(*nodes: Node, mbit: int = SLOW_MBIT) -> Iterator[None]:
    """Bound what nodes send for the length of a `with` block."""
    for node in nodes:
        node.host.limit(mbit)
    try:
        yield
    finally:
        for node in nodes:
            node.host.limit(None)


def content_of(seed: int, size_bytes: int = FILE_BYTES) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def fetching(node: Node) -> int:
    with Client(node.store) as client:
        cluster_status = client.status()["cluster"]
        assert isinstance(cluster_status["fetching"], int)
        return cluster_status["fetching"]


def fetched_bytes(node: Node) -> int:
    with Client(node.store) as client:
        count = client.status()["counters"]["fetched_bytes"]
        assert isinstance(count, int)
        return count


def has_copy(node: Node, name: str) -> bool:
    with Client(node.store) as client:
        inode = client.stat(name.encode())
        assert inode is not None
        return client.blobs([inode.digest])[0] is not None


def has_blob(node: Node, content: bytes) -> bool:
    with Client(node.store) as client:
        return client.blobs([digest_of(content)])[0] is not None


def blob_path(node: Node, name: str) -> Path:
    with Client(node.store) as client:
        inode = client.stat(name.encode())
        assert inode is not None
        digest = inode.digest.hex()
    return node.store / "blobs" / digest[:2] / digest[2:4] / digest


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def shows(node: Node, name: str) -> bool:
    """Whether a node opens a name, which asks more than what its kernel remembers."""
    try:
        with open(node.mountpoint / name, "rb"):
            return True
    except FileNotFoundError:
        return False


def fails(fd: int, offset: int) -> bool:
    try:
        os.pread(fd, 10, offset)
    except OSError as error:
        assert error.errno == errno.EIO
        return True
    return False


def is_clean(node: Node) -> bool:
    """Whether nothing is fetched, and nothing is left of what was."""
    return fetching(node) == 0 and not list((node.store / "staging").iterdir())


def test_the_first_bytes_are_here_before_the_rest(rig: Rig) -> None:
    a, b, _ = rig.nodes
    content = content_of(1)
    (a.mountpoint / "first").write_bytes(content)
    before = fetched_bytes(b)
    with slowed(a), open(b.mountpoint / "first", "rb", buffering=0) as file:
        assert file.read(4096) == content[:4096]
        assert fetching(b) == 1
        assert not has_copy(b, "first")
    with open(b.mountpoint / "first", "rb") as file:
        assert file.read() == content
    wait_until(lambda: has_copy(b, "first"))
    assert fetched_bytes(b) == before + FILE_BYTES
    assert is_clean(b)
    assert (b.mountpoint / "first").read_bytes() == content
    wait_until(lambda: opens_as_if_it_had_been_here(b, "first"))


def opens_as_if_it_had_been_here(node: Node, name: str) -> bool:
    """Where the kernel can, it serves a file by itself; one that is a second old."""
    with Client(node.store) as client, open(node.mountpoint / name, "rb"):
        mount = client.status()["mount"]
        return mount["reads"] != "passthrough" or mount["open_in_passthrough"] == 1


def test_readers_of_one_file_share_a_fetch(rig: Rig) -> None:
    a, b, _ = rig.nodes
    content = content_of(2)
    (a.mountpoint / "shared").write_bytes(content)
    before = fetched_bytes(b)
    found: list[bytes] = []

    def read() -> None:
        found.append((b.mountpoint / "shared").read_bytes())

    def open_as_client() -> None:
        with Client(b.store, deadline_s=SOON_S) as client:
            [opened] = client.open([b"shared"])
            assert opened is not None
            found.append(os.pread(opened.fd, FILE_BYTES + 1, 0))
            opened.close()

    with slowed(a):
        readers = [threading.Thread(target=read) for _ in range(3)]
        readers.append(threading.Thread(target=open_as_client))
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(SOON_S)
    assert found == [content] * 4
    assert fetched_bytes(b) == before + FILE_BYTES


def test_reads_anywhere_come_before_what_lies_between(rig: Rig) -> None:
    a, b, _ = rig.nodes
    content = content_of(3)
    (a.mountpoint / "anywhere").write_bytes(content)
    rng = random.Random(4)
    with slowed(a), open(b.mountpoint / "anywhere", "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 100, FILE_BYTES - 50) == content[-50:]
        assert os.pread(file.fileno(), 100, FILE_BYTES + 50) == b""
        assert fetching(b) == 1
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for _ in range(2):
                at = rng.randrange(FILE_BYTES - 5000)
                assert mapped[at : at + 5000] == content[at : at + 5000]
            assert fetching(b) == 1
            assert mapped[:] == content


def test_a_holder_that_dies_is_replaced(rig: Rig) -> None:
    a, b, c = rig.nodes
    content = content_of(5)
    (a.mountpoint / "replaced").write_bytes(content)
    assert (c.mountpoint / "replaced").read_bytes() == content
    wait_until(lambda: has_copy(c, "replaced"))
    with slowed(a, c), open(b.mountpoint / "replaced", "rb", buffering=0) as file:
        assert file.read(4096) == content[:4096]
        assert fetching(b) == 1
        c.kill()
        rest = b""
        while data := file.read(MIB):
            rest += data
    c.clear()
    c.start()
    assert rest == content[4096:]


def test_without_a_holder_the_read_fails_and_nothing_is_left(rig: Rig) -> None:
    a, b, _ = rig.nodes
    content = content_of(6)
    (a.mountpoint / "gone").write_bytes(content)
    with slowed(a), open(b.mountpoint / "gone", "rb", buffering=0) as file:
        assert file.read(4096) == content[:4096]
        assert fetching(b) == 1
        a.kill()
        with pytest.raises(OSError) as caught:
            while file.read(MIB):
                pass
        assert caught.value.errno == errno.EIO
        with pytest.raises(FileNotFoundError):
            (b.mountpoint / "gone").read_bytes()
        wait_until(lambda: fails(file.fileno(), 0))  # also what had come
    assert not has_copy(b, "gone")
    wait_until(lambda: is_clean(b))
    a.clear()
    a.start()
    assert (b.mountpoint / "gone").read_bytes() == content


def spoil(path: Path, at: int) -> None:
    """Change a byte so that nobody sees it by the file's times."""
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_holder_checks_its_bytes_before_it_gives_them(rig: Rig) -> None:
    a, b, _ = rig.nodes
    (a.mountpoint / "rotten").write_bytes(content_of(7))
    path = blob_path(a, "rotten")
    a.stop()
    spoil(path, 5 * MIB)
    a.start()

    def is_a_miss() -> bool:
        with pytest.raises(OSError) as caught:
            (b.mountpoint / "rotten").read_bytes()
        # EIO: its holder has just come back, and was not reached. ESTALE: its names go meanwhile.
        assert caught.value.errno in (errno.ENOENT, errno.ESTALE, errno.EIO)
        return caught.value.errno == errno.ENOENT

    wait_until(is_a_miss)
    assert [file.name.split(".")[0] for file in (a.store / "quarantine").iterdir()] == [path.name]
    wait_until(lambda: is_clean(b))


def test_nobody_reads_wrong_bytes_to_their_end(rig: Rig) -> None:
    """The holder has checked them before they changed."""
    a, b, c = rig.nodes
    content = content_of(8)
    (a.mountpoint / "wrong").write_bytes(content)
    spoil(blob_path(a, "wrong"), 9 * MIB)
    with open(b.mountpoint / "wrong", "rb", buffering=0) as file:
        done = 0
        with pytest.raises(OSError) as caught:
            while data := file.read(MIB):
                done += len(data)
        assert caught.value.errno == errno.EIO
        assert done < FILE_BYTES
    assert not has_copy(b, "wrong")
    small = content_of(9, 3 * MIB)
    (a.mountpoint / "small").write_bytes(small)
    assert (c.mountpoint / "small").read_bytes() == small
    spoil(blob_path(a, "small"), MIB)
    assert (b.mountpoint / "small").read_bytes() == small  # of the other holder
    wait_until(lambda: is_clean(b))


def overwrite_elsewhere(a: Node, b: Node) -> bytes:
    (a.mountpoint / "changed").write_bytes(b"new")
    return b"new"


def remove_elsewhere(a: Node, b: Node) -> None:
    (a.mountpoint / "changed").unlink()


def evict_elsewhere(a: Node, b: Node) -> None:
    with Client(a.store) as client:
        assert client.evict([b"changed"]) == 1


def overwrite(a: Node, b: Node) -> bytes:
    (b.mountpoint / "changed").write_bytes(b"new")
    return b"new"


def write_into(a: Node, b: Node) -> bytes:
    with open(b.mountpoint / "changed", "r+b") as file:
        file.seek(10)
        file.write(b"within")
    return content_of(10)[:10] + b"within" + content_of(10)[16:]


def cut(a: Node, b: Node) -> bytes:
    os.truncate(b.mountpoint / "changed", 5 * MIB)
    return content_of(10)[: 5 * MIB]


def empty(a: Node, b: Node) -> bytes:
    os.truncate(b.mountpoint / "changed", 0)
    return b""


def remove(a: Node, b: Node) -> None:
    (b.mountpoint / "changed").unlink()


def rename_over(a: Node, b: Node) -> bytes:
    (b.mountpoint / "other").write_bytes(b"other")
    (b.mountpoint / "other").rename(b.mountpoint / "changed")
    return b"other"


def rename_away(a: Node, b: Node) -> None:
    (b.mountpoint / "changed").rename(b.mountpoint / "away")


@pytest.mark.parametrize(
    "change",
    [
        overwrite_elsewhere, remove_elsewhere, evict_elsewhere, overwrite, write_into, cut, empty,
        remove, rename_over, rename_away,
    ],
)  # fmt: skip
def test_who_reads_what_arrives_keeps_it_whatever_becomes_of_the_name(
    rig: Rig, change: Callable[[Node, Node], bytes | None]
) -> None:
    a, b, c = rig.nodes
    content = content_of(10)
    (a.mountpoint / "changed").write_bytes(content)
    with ExitStack() as stack, ExitStack() as slow:
        slow.enter_context(slowed(a))
        file = stack.enter_context(open(b.mountpoint / "changed", "rb", buffering=0))
        head = file.read(4096)
        assert fetching(b) == 1
        left = change(a, b)
        slow.close()
        for node in (a, b, c):
            if left is None:
                assert not shows(node, "changed")
            else:
                assert (node.mountpoint / "changed").read_bytes() == left
        rest = b""
        while data := file.read(MIB):
            rest += data
        assert head + rest == content
    for name in ("changed", "away"):
        (b.mountpoint / name).unlink(missing_ok=True)
    for node in (a, b, c):
        with Client(node.store) as client:
            for path in (b"changed", b"away"):
                assert client.stat(path) is None
    wait_until(lambda: is_clean(b) and not has_blob(b, content))  # for the next one


def test_a_mount_that_ends_waits_for_no_fetch(rig: Rig) -> None:
    a, b, _ = rig.nodes
    (a.mountpoint / "endless").write_bytes(content_of(11))
    failed: list[int | None] = []

    def read() -> None:
        try:
            (b.mountpoint / "endless").read_bytes()
        except OSError as error:
            failed.append(error.errno)

    with slowed(a, mbit=CRAWL_MBIT):
        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: fetching(b) == 1)
        assert b.process is not None
        b.process.terminate()
        assert b.process.wait(SOON_S / 2) == 0
        b.process = None
        reader.join(SOON_S)
    assert failed
    b.start()
    assert is_clean(b)
    assert (b.mountpoint / "endless").read_bytes() == content_of(11)
