"""What the shell says of prompts: their prefixes as a tree, and what of one is cached."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvfs.client import Client
from tests.chunks import FINGERPRINT, MODEL, SPACE, chunk_file, store_chain
from tests.commands import DEADLINE_S, kvfs, kvfs_json, kvfs_text
from tests.conftest import StartMount, StartNode
from tests.files import store_bytes

TOKENS = list(range(2, 2 + 1100))  # four chunks of 256, and 76 tokens


@pytest.fixture
def store(start_node: StartNode) -> Path:
    return start_node().store


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A directory with a tokenizer whose word `wN` has the id N."""
    words = {"<unk>": 0, **{f"w{number}": number for number in range(1, 2000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_prefixes_as_a_tree(store: Path, tokenizer: Path) -> None:
    with Client(store) as client:
        store_chain(client, "ab", tokens=TOKENS)
        store_chain(client, "cd", "b", 2, tokens=TOKENS)
        store_chain(client, "e", "b", 2)
        gone = store_chain(client, "xyz")[0]
        client.evict([gone])
    document = kvfs_json("prefixes", "--tokenizer", tokenizer, store=store)
    (model,) = document["models"]
    assert (model["model"], model["chunk_files"], model["is_cut"]) == (MODEL, 7, False)
    runs = [
        (r["number"], r["parent"], r["token_start"], r["token_end"], r["chunks"], r["is_orphan"])
        for r in model["runs"]
    ]
    assert runs == [
        (1, None, 0, 512, 2, False),
        (2, 1, 512, 768, 1, False),
        (3, 1, 512, 1024, 2, False),
        (4, None, 256, 768, 2, True),
    ]
    assert model["runs"][0]["text"].startswith("w2 w3 w4 ")
    assert model["runs"][1]["text"] is None
    text = kvfs_text("prefixes", "Qwen", "--tokenizer", tokenizer, store=store)
    lines = text.splitlines()
    assert lines[0].startswith(f"{MODEL}@{FINGERPRINT}  7 chunk files")
    assert lines[1].startswith("└─ 0-512  2 chunks  ") and '"w2 w3 ' in lines[1]
    assert lines[2].startswith("   ├─ 512-768  1 chunk  ")
    assert lines[3].startswith("   └─ 512-1024  2 chunks  ")
    assert lines[4].startswith("cut off")
    assert lines[5].startswith("└─ 256-768  2 chunks  ")
    short = kvfs_text("prefixes", "--limit", "1", store=store).splitlines()
    assert len(short) == 3 and "--limit 0" in short[-1]
    ascii_only = subprocess.run(
        [sys.executable, "-m", "kvfs", "prefixes", "--store", str(store)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert b"\n   |- 512-768" in ascii_only.stdout
    with Client(store) as client:
        gone = b"kv/empty@" + FINGERPRINT.encode() + b"/ab/x"
        store_bytes(client, gone, b"x")
        client.evict([gone])
    assert len(kvfs_json("prefixes", store=store)["models"]) == 1
    assert len(kvfs_json("prefixes", "--all", store=store)["models"]) == 2
    assert kvfs("prefixes", "empty", store=store).returncode == 1
    cut = kvfs_text("prefixes", "--depth", "1", store=store).splitlines()
    assert "+ 3 chunks in 2 branches" in cut[1]


def test_explain(store: Path, tokenizer: Path, tmp_path: Path) -> None:
    with Client(store) as client:
        paths = store_chain(client, "abcd", tokens=TOKENS)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(TOKENS))
    words = ("explain", "--model", MODEL)
    (found,) = kvfs_json(*words, "--tokens", ids, store=store)["models"]
    assert (found["hit_tokens"], found["end"]) == (1024, "complete")
    assert found["chunks"][0]["directories"] == [str(store)]
    assert found["load_bytes"] == sum(c["size_bytes"] for c in found["chunks"])
    assert 0 < found["load_s"] < 10
    text = " ".join(f"w{token}" for token in TOKENS[:300])
    (found,) = kvfs_json(*words, "--text", text, "--tokenizer", tokenizer, store=store)["models"]
    assert (found["hit_tokens"], found["end"]) == (256, "complete")
    with Client(store) as client:
        client.evict([paths[1]])
    shown = kvfs_text(*words, "--tokens", ids, store=store)
    assert "256 of 1,100 tokens cached" in shown and "gap" in shown
    assert "s with one thread" in shown.splitlines()[0]
    assert [line.split()[:2] for line in shown.splitlines()[1:-1]] == [
        ["0-256", "hit"],
        ["256-512", "miss"],
        ["512-768", "unusable"],
        ["768-1024", "unusable"],
    ]
    ran = kvfs(*words, "--text", "hello", store=store)
    assert ran.returncode == 2 and "--tokenizer" in ran.stderr


def test_bad_tokenizers_and_token_files_are_one_line(store: Path, tmp_path: Path) -> None:
    with Client(store) as client:
        store_chain(client, "a", tokens=TOKENS)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    (tmp_path / "ids").write_bytes(b"\xff\xfe")
    for words in (
        ("prefixes", "--tokenizer", tmp_path),
        ("prefixes", "--tokenizer", tmp_path / "absent"),
        ("explain", "--model", MODEL, "--tokens", tmp_path / "ids"),
        ("explain", "--model", MODEL, "--tokens", tmp_path / "absent"),
    ):
        ran = kvfs(*words, store=store)
        assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), words


def test_a_chunk_in_the_directory_of_another_model_is_not_called_cached(
    start_mount: StartMount, tmp_path: Path
) -> None:
    mount = start_mount()
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(TOKENS[:256]))
    path, data, _ = chunk_file("a", None, 0, TOKENS)
    own = mount.mountpoint / os.fsdecode(path)
    others = [
        mount.mountpoint / "kv" / f"{name}" / own.parent.name / own.name
        for name in (f"Other@{FINGERPRINT}", f"{own.parent.parent.name[:-4]}0000")
    ]
    for file in (own, *others):
        file.parent.mkdir(parents=True)

    def cached() -> list[str]:
        """The directories in which the prompt is called cached, by `prefixes` and by `explain`."""
        found = []
        for directory in (file.parent.parent.name for file in (own, *others)):
            words = ("explain", "--model", directory, "--tokens", ids)
            ran = kvfs(*words, "--json", store=mount.store)
            hits = [m["hit_tokens"] for m in json.loads(ran.stdout)["models"]] if ran.stdout else []
            models = kvfs_json("prefixes", directory, "--all", store=mount.store)["models"]
            runs = [run for model in models for run in model["runs"]]
            assert (sum(hits) > 0) is bool(runs)
            found += [directory] if runs else []
        return found

    own.write_bytes(data)
    for file in others:
        shutil.copy(own, file)
    assert cached() == [own.parent.parent.name]
    for file in others:
        file.unlink()
        own.rename(file)
        assert cached() == []
        file.rename(own)
        assert cached() == [own.parent.parent.name]
    own.rename(mount.mountpoint / "outside")
    assert cached() == []


def test_a_renamed_directory_of_a_model_holds_nothing_that_is_called_cached(
    start_mount: StartMount, tmp_path: Path
) -> None:
    mount = start_mount()
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(TOKENS))
    with Client(mount.store) as client:
        store_chain(client, "ab", tokens=TOKENS)
    home = mount.mountpoint / os.fsdecode(SPACE)
    other = home.with_name(f"Other@{FINGERPRINT}")
    words = ("--model", other.name, "--tokens", ids)
    home.rename(other)
    (model,) = kvfs_json("prefixes", store=mount.store)["models"]
    assert (model["runs"], model["stored_for"]) == ([], os.fsdecode(SPACE))
    assert f"stored for {os.fsdecode(SPACE)}" in kvfs_text("prefixes", store=mount.store)
    ran = kvfs("explain", *words, store=mount.store)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert f"stored for {os.fsdecode(SPACE)}" in ran.stderr
    other.rename(home)
    (found,) = kvfs_json("explain", "--model", MODEL, "--tokens", ids, store=mount.store)["models"]
    assert found["hit_tokens"] == 512
    (model,) = kvfs_json("prefixes", store=mount.store)["models"]
    assert [run["chunks"] for run in model["runs"]] == [2] and model["stored_for"] is None
