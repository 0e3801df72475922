"""Publication on a disk that fails, and of bytes whose old copy is lost."""

import errno
import os

import pytest

from kvfs.blobs import BlobDirectory
from kvfs.digest import digest_of
from kvfs.errors import NamespaceError, OutOfSpace
from kvfs.life import recover
from kvfs.node import Node
from tests.own_node import (
    blob_path,
    content_of,
    load,
    put_orphan,
    store,
)


@pytest.mark.parametrize(
    ("loss", "index"),
    [("removed", 0), ("removed", 1), ("cut short", 0), ("cut short", 1), ("directory absent", 0)],
)
def test_a_new_copy_of_lost_bytes_saves_their_names(
    node: Node, allow_warnings: list[str], loss: str, index: int
) -> None:
    if loss != "directory absent":
        allow_warnings.append("had lost its file; a new copy takes its place")
    data = b"bytes" * 3000
    digest = digest_of(data)
    old = store(node, b"old", data, 1)
    node.meta.set_pinned(old.ino, True)
    store(node, b"other", b"other", 1)
    expected = [0, blob_path(node, digest_of(b"other"), 1).stat().st_blocks * 512]
    if loss == "removed":
        blob_path(node, digest, 1).unlink()
    elif loss == "cut short":
        os.truncate(blob_path(node, digest, 1), 5)
    else:
        node.directories[1] = None  # type: ignore[index]  # as if its disk were not mounted
    store(node, b"new", data, index)
    assert load(node, b"old") == load(node, b"new") == data
    (inode,) = node.meta.resolve([b"old"])
    assert inode is not None
    assert (inode.ino, inode.pinned) == (old.ino, True)
    (blob,) = node.meta.blobs([digest])
    assert blob is not None
    assert (blob.directory, blob.references) == (index, 2)
    expected[index] += blob_path(node, digest, index).stat().st_blocks * 512
    assert node.meta.usage().allocated_bytes == tuple(expected)
    if loss != "directory absent":  # the damaged file does not stay behind
        assert not blob_path(node, digest, 1 - index).exists()


def test_other_bytes_under_a_known_digest_are_refused_and_lose_nothing(node: Node) -> None:
    digest = digest_of(b"right")
    store(node, b"old", b"right")
    blob_path(node, digest).unlink()
    with pytest.raises(NamespaceError):
        store(node, b"new", b"of another length", 1, digest)
    assert node.meta.resolve([b"new"]) == [None]
    assert node.meta.resolve([b"old"])[0] is not None
    assert os.listdir(node.config.directories[1].path / "blobs") == []


@pytest.mark.parametrize("fails_at", [2, 3])
def test_a_publication_that_fails_half_way_uses_all_its_stages_up(
    node: Node, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    contents = [content_of(node, b"f%d" % n, b"%d" % n) for n in range(3)]
    adopt, adopted = BlobDirectory.adopt, []

    def fail(directory: BlobDirectory, name: str, digest: bytes) -> None:
        adopted.append(name)
        if len(adopted) == fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        adopt(directory, name, digest)

    monkeypatch.setattr(BlobDirectory, "adopt", fail)
    with pytest.raises(OSError, match="Input/output error"):
        node.publisher.publish(contents)
    for content in contents:
        assert not content.stage.is_open
        assert os.fstat(content.stage.fd).st_size == 1  # it is the caller's still
        os.close(content.stage.fd)
    assert os.listdir(node.config.home / "staging") == []
    assert node.space.staging_bytes(0) == 0
    assert node.meta.recover().intended == ()
    assert node.meta.usage().blobs == 0
    assert list((node.config.home / "blobs").glob("*/*/*")) == []


def test_a_publication_that_fails_before_anything_moved_may_be_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OutOfSpace("full")

    content = content_of(node, b"f", b"bytes")
    for owner, name in ((type(node.meta), "intend"), (BlobDirectory, "adopt")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(OutOfSpace):
                node.publisher.publish([content])
        assert content.stage.is_open
        assert node.meta.recover().intended == ()
    node.publisher.publish([content])
    assert node.meta.sizes([b"f"]) == [5]
    os.close(content.stage.fd)


def test_a_second_copy_that_a_dead_node_left_is_removed(node: Node) -> None:
    data = b"bytes"
    for path in (b"elsewhere", b"here"):
        store(node, path, path + data)
    second = put_orphan(node, digest_of(b"elsewhere" + data), data, 1)
    node.meta.intend([(digest_of(b"elsewhere" + data), 1), (digest_of(b"here" + data), 0)])
    recover(node)
    assert not second.exists()
    assert [load(node, path) for path in (b"elsewhere", b"here")] == [
        b"elsewherebytes",
        b"herebytes",
    ]
    assert node.meta.recover().intended == ()
