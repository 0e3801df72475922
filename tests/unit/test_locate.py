"""Which store and which paths a command means."""

import os
from pathlib import Path

import pytest

from kvfs.errors import InvalidInput
from kvfs.home import is_store
from kvfs.shell.locate import Mounted, Place, locate

ONE = Mounted(Path("/mnt/one"), Path("/stores/one"))
TWO = Mounted(Path("/mnt/two"), Path("/stores/two"))
INNER = Mounted(Path("/mnt/one/inner"), Path("/stores/inner"))


def place(*paths: str, store: str | None = None, mounts: tuple[Mounted, ...] = ()) -> Place:
    chosen = None if store is None else Path(store)
    return locate(chosen, paths, lambda: mounts, lambda: Path("/var/lib/kvfs"))


def test_nothing_said_and_nothing_mounted_is_the_default_store() -> None:
    assert place("kv") == Place(Path("/var/lib/kvfs"), (b"kv",))


def test_the_only_mount_is_meant() -> None:
    assert place("/kv/a", mounts=(ONE,)) == Place(ONE.store, (b"kv/a",), ONE.mountpoint)


def test_a_path_in_a_mount_says_which_and_is_stripped() -> None:
    found = place("/mnt/two/kv/../x", "/mnt/two", mounts=(ONE, TWO))
    assert found == Place(TWO.store, (b"x", b""), TWO.mountpoint)


def test_a_name_that_only_begins_like_a_mount_is_not_in_it() -> None:
    found = place("/mnt/one-more/x", store="/stores/one", mounts=(ONE,))
    assert found.paths == (b"mnt/one-more/x",)


def test_the_innermost_mount_holds_a_path() -> None:
    assert place("/mnt/one/inner/x", mounts=(ONE, INNER)) == Place(
        INNER.store, (b"x",), INNER.mountpoint
    )


def test_a_relative_path_counts_from_the_working_directory_in_a_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    here = Mounted(tmp_path, Path("/stores/here"))
    assert place("a", ".", mounts=(here,)).paths == (b"sub/a", b"sub")
    assert place("a", "/", mounts=(ONE,)).paths == (b"a", b"")


def test_store_wins_over_mounts() -> None:
    assert place("x", store="/stores/none", mounts=(ONE, TWO)) == Place(
        Path("/stores/none"), (b"x",)
    )
    assert place("/mnt/one/x", store="/stores/one", mounts=(ONE, TWO)) == Place(
        ONE.store, (b"x",), ONE.mountpoint
    )


def test_several_mounts_and_no_hint_is_an_error_that_lists_them() -> None:
    with pytest.raises(InvalidInput, match=r"/mnt/one .*/mnt/two .*--store"):
        place("x", mounts=(ONE, TWO))


def test_paths_of_two_stores_are_refused() -> None:
    with pytest.raises(InvalidInput, match="several mounts"):
        place("/mnt/one/x", "/mnt/two/x", mounts=(ONE, TWO))
    with pytest.raises(InvalidInput, match="not in --store"):
        place("/mnt/one/x", store="/stores/two", mounts=(ONE, TWO))


def test_bytes_that_are_no_text_survive() -> None:
    assert place("/mnt/one/\udcff\n", mounts=(ONE,)).paths == (b"\xff\n",)


def test_dots_never_leave_the_namespace() -> None:
    assert place("../../x", "//x//y/.", mounts=()).paths == (b"x", b"x/y")


@pytest.fixture
def linked(tmp_path: Path) -> Mounted:
    """A mount point, and links that lead to it and into it."""
    (tmp_path / "real" / "mnt").mkdir(parents=True)
    (tmp_path / "dir").symlink_to("real")
    (tmp_path / "link").symlink_to("dir/mnt")
    (tmp_path / "below").symlink_to(tmp_path / "link" / "sub")
    (tmp_path / "real" / "up").symlink_to("../link/sub")
    (tmp_path / "round").symlink_to("round")
    return Mounted(tmp_path / "real" / "mnt", Path("/stores/linked"))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("link", b""),
        ("link/a", b"a"),
        ("dir/mnt/a", b"a"),
        ("below/a", b"sub/a"),
        ("below/../a", b"a"),
        ("dir/../dir/mnt/a", b"a"),
        ("real/up/a", b"sub/a"),
        ("dir/up", b"sub"),
    ],
)
def test_links_lead_into_a_mount(
    linked: Mounted, tmp_path: Path, path: str, found: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Place(linked.store, (found,), linked.mountpoint)
    assert place(f"{tmp_path}/{path}", mounts=(linked, ONE)) == expected
    monkeypatch.chdir(tmp_path)
    assert place(path, mounts=(linked, ONE)) == expected


def test_what_lies_in_a_mount_is_not_looked_at(linked: Mounted, tmp_path: Path) -> None:
    (linked.mountpoint / "out").symlink_to("/")
    assert place(f"{tmp_path}/link/out/etc", mounts=(linked,)).paths == (b"out/etc",)


def test_links_that_lead_nowhere_are_names(linked: Mounted, tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("nothing")
    for path in (f"{tmp_path}/round/a", f"{tmp_path}/gone"):
        assert place(path, mounts=(linked,)).paths == (os.fsencode(path).lstrip(b"/"),)


def test_the_mount_that_one_works_in_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    here = Mounted(tmp_path, Path("/stores/here"))
    monkeypatch.chdir(tmp_path / "sub")
    assert place(mounts=(ONE, here)) == Place(here.store, (), here.mountpoint)
    assert place("/", mounts=(ONE, here)) == Place(here.store, (b"",), here.mountpoint)
    assert place("/mnt/one/x", mounts=(ONE, here)).store == ONE.store
    assert place("a", store="/stores/one", mounts=(ONE, here)).paths == (b"a",)


def test_a_store_may_be_named_by_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("store", "mnt", "mnt/sub"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("store")
    mount = Mounted(tmp_path / "mnt", tmp_path / "store")
    monkeypatch.chdir(tmp_path / "mnt" / "sub")
    found = place("a", str(tmp_path / "mnt" / "b"), store=str(tmp_path / "link"), mounts=(mount,))
    assert found == Place(tmp_path / "link", (b"sub/a", b"b"), mount.mountpoint)


def test_a_working_directory_that_was_removed_is_no_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert place("a", mounts=(ONE,)) == Place(ONE.store, (b"a",), ONE.mountpoint)
    assert place("/mnt/one/a", mounts=(ONE, TWO)).paths == (b"a",)


def test_what_a_store_is(tmp_path: Path) -> None:
    assert not is_store(tmp_path / "absent")
    assert not is_store(tmp_path)
    (tmp_path / "kvfs.toml").touch()
    assert is_store(tmp_path)
