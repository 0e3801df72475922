"""`kvfs replay` as a person runs it: on simulated tiers, and on real directories."""

import json
from pathlib import Path

import pytest

from kvfs import cli
from kvfs.errors import OutOfSpace
from kvfs.tiers.contract import Source
from kvfs.tiers.directory import DirectoryTier

BLOCK_BYTES = 64 * 1024


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(["replay", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten requests that share 8 blocks and have 4 of their own."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 10 * number,
            "input_length": 12 * 512,
            "output_length": 3,
            "hash_ids": [*range(8), *range(100 * number + 8, 100 * number + 12)],
        }
        for number in range(10)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def tiers(tmp_path: Path) -> Path:
    """A configuration with two directories as tiers."""
    file = tmp_path / "kvfs.toml"
    file.write_text(
        "".join(
            f'[[tiers]]\nname = "{name}"\nkind = "{kind}"\npath = "{tmp_path / name}"\n'
            for name, kind in (("near", "nvme"), ("far", "shared"))
        )
    )
    return file


def blobs(tmp_path: Path) -> int:
    return sum(path.is_file() for path in tmp_path.glob("*/blobs/*/*/*"))


def test_on_simulated_tiers(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--simulate", "fast:2:0.1", "--simulate", "slow:1", "--capacity", "fast:640MiB")
    code, out, err = run(*words, "--json", capsys=capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["requests"] == 10
    assert found["hit_blocks"] == 9 * 8
    assert found["hit_ratio"] == pytest.approx(9 * 8 / 120)
    assert [tier["name"] for tier in found["tiers"]] == ["fast", "slow"]
    code, out, _ = run(*words, capsys=capsys)
    assert code == 0
    assert "60.0% hit" in out


def test_on_real_tiers_that_are_prepared_first(
    trace: Path, tiers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (trace, "--config", tiers, "--block-bytes", BLOCK_BYTES, "--speed", 10, "--json")
    code, out, err = run(*words, capsys=capsys)
    assert (code, out) == (2, "")
    assert "tier near: lacks 8 of 8 blocks of this trace; put them there with --prepare" in err
    code, out, err = run(*words, "--prepare", capsys=capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["hit_bytes"] == 9 * 8 * BLOCK_BYTES
    assert found["lost_blocks"] == 0
    assert found["requests_hit"] == 9
    assert sum(tier["read_bytes"] for tier in found["tiers"]) == found["hit_bytes"]
    assert blobs(tmp_path) == 16
    code, _, err = run(*words, "--remove", capsys=capsys)
    assert (code, err) == (0, "")
    assert blobs(tmp_path) == 0


def test_what_was_put_is_taken_out_again_when_not_all_could_be(
    trace: Path,
    tiers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, count = DirectoryTier.put, 0

    def full_after_ten(self: DirectoryTier, digest: bytes, source: Source, size_bytes: int) -> None:
        nonlocal count
        count += 1
        if count > 10:
            raise OutOfSpace("tier far: full")
        put(self, digest, source, size_bytes)

    monkeypatch.setattr(DirectoryTier, "put", full_after_ten)
    words = (trace, "--config", tiers, "--block-bytes", BLOCK_BYTES, "--prepare")
    assert run(*words, capsys=capsys)[0] == 2
    assert blobs(tmp_path) == 10
    count = 0
    code, _, err = run(*words, "--remove", capsys=capsys)
    assert (code, blobs(tmp_path)) == (0, 0), err
    code, _, err = run(*words, "--remove", capsys=capsys)
    assert (code, blobs(tmp_path)) == (2, 0)
    assert "tier far: full" in err


def test_blocks_that_are_wrong_everywhere_are_lost_and_the_exit_code_says_so(
    trace: Path,
    tiers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    allow_warnings: list[str],
) -> None:
    allow_warnings.append("had wrong bytes for")
    words = (trace, "--config", tiers, "--block-bytes", BLOCK_BYTES, "--speed", 10)
    assert run(*words, "--prepare", capsys=capsys)[0] == 0
    digest = next(iter((tmp_path / "near").glob("blobs/*/*/*"))).relative_to(tmp_path / "near")
    for name in ("near", "far"):
        file = tmp_path / name / digest
        file.write_bytes(bytes(BLOCK_BYTES))
    code, out, _ = run(*words, capsys=capsys)
    assert code == 1
    assert "which no tier could give" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--simulate", "nvme"), "is no tier; write NAME:GB_PER_S"),
        (("--simulate", "a:1", "--prepare"), "has no real tiers"),
        (("--simulate", "a:1", "--capacity", "b:1GiB"), "'b' is no tier; there are a"),
        (("--simulate", "a:1", "--capacity", "a:much"), "is no size"),
        (("--simulate", "a:1", "--capacity", "a:0"), "holds not one block of 64 MiB; write for"),
        (("--simulate", "a:1", "--limit", "0"), "write 1 or more, or leave it out"),
        (("--simulate", "a:1", "--block-bytes", "1"), "is less than 4096"),
        (("--simulate", "a:1", "--block-bytes", "4GiB"), "--block-bytes: 4 GiB is more than 1 GiB"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_code_2(
    words: tuple[str, ...], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(trace, *words, capsys=capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_line_that_is_none_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(trace, "a") as file:
        file.write('{"timestamp": 1e3}\n')
    code, _, err = run(trace, "--simulate", "a:1", capsys=capsys)
    assert code == 2
    assert f"{trace}, line 11: has no input_length" in err


def test_a_configuration_without_tiers_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    code, _, err = run(trace, "--config", empty, capsys=capsys)
    assert code == 2
    assert "has no [[tiers]]" in err
