"""`.kvfs/prefixes`: the tree of cached chunks, as directories to walk."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import tokenizers
import xxhash

from kvfs.chunk import ChunkHeader, TensorSpec, encode_header
from kvfs.names import chunk_key, chunk_path, namespace_path
from mount.point import find_mount
from tests.mounts import MountProcess

MODEL, FINGERPRINT = "org/model-1", "f" * 32
NAMESPACE = namespace_path(MODEL, FINGERPRINT)
WORDS = ["red", "green", "blue", "black"]


def store_chunk(
    mounted: Path, number: int, parent: int | None, tokens: list[int] | None, start: int = 0
) -> str:
    """Write a chunk file through the mount as an engine would; its key."""
    key = chunk_key(bytes([number]) * 8, 0, 0)
    payload = bytes([number]) * 4096
    header = ChunkHeader(
        model=MODEL,
        fingerprint=FINGERPRINT,
        key=key,
        parent="" if parent is None else chunk_key(bytes([parent]) * 8, 0, 0),
        token_start=start,
        token_end=start + 4,
        group=0,
        shard=0,
        engine="test",
        digest=xxhash.xxh3_128_digest(payload),
        token_ids=None if tokens is None else tuple(tokens),
        tensors=(TensorSpec("kv", "U8", (4096,)),),
    )
    path = mounted / os.fsdecode(chunk_path(NAMESPACE, key))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(encode_header(header) + payload)
    os.rename(temporary, path)
    return key


def tree(prefixes: Path) -> dict[str, list[str]]:
    """Every directory below, by its path, with what it holds."""
    return {
        os.path.relpath(folder, prefixes): sorted(folders + files)
        for folder, folders, files in os.walk(prefixes)
    }


def test_the_tree_of_prefixes(mounted: MountProcess) -> None:
    root = mounted.mountpoint
    first = store_chunk(root, 1, None, [1, 2, 3, 4])
    second = store_chunk(root, 2, 1, [5, 6, 7, 8], 4)
    third = store_chunk(root, 3, 1, None, 4)
    other = store_chunk(root, 4, None, [9, 9, 9, 9])
    orphan = store_chunk(root, 6, 5, [1, 1, 1, 1], 8)
    model = os.fsdecode(NAMESPACE.removeprefix(b"kv/"))
    (root / "kv" / "no namespace").mkdir()
    prefixes = root / ".kvfs" / "prefixes"
    assert tree(prefixes) == {
        ".": [model],
        model: sorted([first, other]),
        f"{model}/{first}": sorted(["info.json", "tokens", second, third]),
        f"{model}/{first}/{second}": ["info.json", "tokens"],
        f"{model}/{first}/{third}": ["info.json"],
        f"{model}/{other}": ["info.json", "tokens"],
    }
    chunk = prefixes / model / first
    assert (chunk / "tokens").read_bytes() == b"1 2 3 4\n"
    assert os.stat(chunk / "tokens").st_size == 8
    shown = subprocess.run(["cat", chunk / second / "tokens"], capture_output=True, check=True)
    assert shown.stdout == b"5 6 7 8\n"
    info = json.loads((chunk / second / "info.json").read_bytes())
    assert os.stat(chunk / second / "info.json").st_size > 100
    assert (info["key"], info["parent"]) == (second, first)
    assert (info["token_start"], info["token_end"], info["group"], info["shard"]) == (4, 8, 0, 0)
    assert info["paths"] == [os.fsdecode(chunk_path(NAMESPACE, second))]
    for wrong in (second, orphan, "text", "none", "0" * 300):
        with pytest.raises(OSError, match=r"No such file|too long"):
            os.stat(prefixes / model / wrong)

    os.unlink(root / os.fsdecode(chunk_path(NAMESPACE, second)))
    assert sorted(os.listdir(chunk)) == sorted(["info.json", "tokens", third])
    assert not (chunk / second / "tokens").exists()


def test_many_children_are_listed_once(mounted: MountProcess) -> None:
    root = mounted.mountpoint
    begin = store_chunk(root, 100, None, [7, 7, 7, 7])
    model = os.fsdecode(NAMESPACE.removeprefix(b"kv/"))
    keys = [store_chunk(root, number, 100, [number] * 4, 4) for number in range(101, 255)]
    names = os.listdir(root / ".kvfs" / "prefixes" / model / begin)
    assert sorted(names) == sorted([*keys, "info.json", "tokens"])


def test_text_with_a_tokenizer(tmp_path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="red")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    mount = MountProcess(
        tmp_path / "store",
        tmp_path / "mnt",
        ["--store", str(tmp_path / "store"), "--tokenizer", str(tmp_path)],
        tmp_path / "log",
        None,
    )
    try:
        mount.wait_serving()
        key = store_chunk(mount.mountpoint, 1, None, [2, 1, 3, 0])
        chunk = mount.mountpoint / ".kvfs" / "prefixes" / os.fsdecode(NAMESPACE[3:]) / key
        assert sorted(os.listdir(chunk)) == ["info.json", "text", "tokens"]
        assert (chunk / "text").read_text() == "blue green black red"
        assert os.stat(chunk / "text").st_size == len("blue green black red")
    finally:
        mount.close()
    assert find_mount(tmp_path / "mnt") is None
