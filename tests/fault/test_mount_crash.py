"""Several kills of a mount under load, by the script that does it hundreds of times."""

from pathlib import Path

from scripts.crash_mount import build, crash, version_of


def test_five_kills_lose_nothing_that_was_closed(tmp_path: Path) -> None:
    report = crash(tmp_path, rounds=5, seed=11)
    assert report.problems == []
    assert report.rounds == 5
    assert sum(report.written.values()) > 20
    assert report.checked_files > 0


def test_the_files_tell_what_is_wrong_with_them() -> None:
    data = build("w-1-2", 7, 5000)
    assert version_of("w-1-2", data) == 7
    flipped = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    for name, bad in (("w-1-3", data), ("w-1-2", data[:-1]), ("w-1-2", b""), ("w-1-2", flipped)):
        try:
            version_of(name, bad)
        except ValueError:
            continue
        raise AssertionError("it was taken for whole")
