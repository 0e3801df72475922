"""Opens that are answered as the one before, on a real mount; skipped where that cannot be."""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvfs.client import Client
from mount.reuse import IS_POSSIBLE
from tests.conftest import StartMount
from tests.files import store_at
from tests.mounts import MountProcess
from tests.processes import wait_until

KIB = 1024
REFUSED = "No thread for opens that are reused"
NO_FRONT = """\
import threading
start = threading.Thread.start
def refuse(thread):
    if thread.name == "pyfuse-front":
        raise RuntimeError("can't start new thread")  # as at a limit on processes
    start(thread)
threading.Thread.start = refuse
"""


@pytest.fixture
def mounted(start_mount) -> MountProcess:  # type: ignore[no-untyped-def]  # a fixture's callable
    return checked(start_mount())


def checked(mount: MountProcess) -> MountProcess:
    why_not = status(mount)["mount"]["why_not_passthrough"]
    if why_not is not None or not IS_POSSIBLE:
        pytest.skip(f"opens are not reused here: {why_not or 'an older patched pyfuse3'}")
    return mount


@pytest.fixture
def place(mounted: MountProcess) -> Iterator[Path]:
    yield mounted.mountpoint


def status(mount: MountProcess) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads(
        (mount.mountpoint / ".kvfs" / "status.json").read_text()
    )
    return found


def count_opens(mount: MountProcess) -> int:
    """How many opens came as far as the blobs."""
    return int(str(status(mount)["counters"]["opens"]))


def keep(mount: MountProcess, path: Path) -> None:
    """Open and close a file until its opens are answered from what was kept; right after a change
    they are not."""

    def is_kept() -> bool:
        path.read_bytes()
        before = count_opens(mount)
        path.read_bytes()
        return count_opens(mount) == before

    wait_until(is_kept)


def test_opens_are_answered_again_and_end_in_time(mounted: MountProcess, place: Path) -> None:
    data = os.urandom(100 * KIB)
    (place / "a").write_bytes(data)
    keep(mounted, place / "a")
    before = count_opens(mounted)
    for _ in range(200):
        assert (place / "a").read_bytes() == data
    assert count_opens(mounted) == before
    assert status(mounted)["mount"]["open_in_passthrough"] == 0
    with open(place / "a", "rb") as file:
        assert file.read() == data
        wait_until(lambda: status(mounted)["mount"]["open_in_passthrough"] == 1)
    wait_until(lambda: status(mounted)["mount"]["open_in_passthrough"] == 0)


def test_a_writer_finds_no_reader_where_nobody_has_it_open(
    mounted: MountProcess, place: Path
) -> None:
    (place / "a").write_bytes(b"old")
    number = (place / "a").stat().st_ino
    keep(mounted, place / "a")
    with open(place / "a", "r+b") as file:
        file.write(b"NEW")
        assert os.fstat(file.fileno()).st_ino == number, "no version of its own"
    assert (place / "a").read_bytes() == b"NEW"
    os.truncate(place / "a", 1)
    assert (place / "a").read_bytes() == b"N"


def test_who_has_it_open_keeps_the_bytes(mounted: MountProcess, place: Path) -> None:
    (place / "a").write_bytes(b"old")
    keep(mounted, place / "a")
    readers = [os.open(place / "a", os.O_RDONLY) for _ in range(3)]
    (place / "a").write_bytes(b"new")
    assert (place / "a").read_bytes() == b"new"
    for reader in readers:
        assert os.pread(reader, 9, 0) == b"old"
        os.close(reader)
    wait_until(lambda: status(mounted)["mount"]["open_in_passthrough"] == 0)


def test_what_has_lost_its_name_takes_no_room(mounted: MountProcess, place: Path) -> None:
    """Nor does it wait until nobody has opened it for long: an older one is kept still."""
    (place / "older").write_bytes(b"older")

    def goes_before_its_time() -> bool:
        for name in ("unlinked", "replaced"):
            (place / name).write_bytes(os.urandom(64 * KIB))
        for name in ("older", "unlinked", "replaced"):
            keep(mounted, place / name)
        (place / "unlinked").unlink()
        (place / "other").write_bytes(b"other")
        os.rename(place / "other", place / "replaced")
        wait_until(lambda: len(list((mounted.store / "blobs").glob("*/*/*"))) == 2)
        before = count_opens(mounted)
        (place / "older").read_bytes()
        return count_opens(mounted) == before

    wait_until(goes_before_its_time, 60)  # a busy machine may take too long, at times


def test_a_mount_goes_on_where_no_thread_can_be_started_for_them(
    start_mount: StartMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_FRONT)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    mount = checked(start_mount(allow=REFUSED))
    for name in ("a", "b"):
        (mount.mountpoint / name).write_bytes(name.encode())
        keep(mount, mount.mountpoint / name)
    assert mount.log.read_text().count(REFUSED) == 1


def test_a_stat_shows_what_was_changed_though_answers_are_kept(
    mounted: MountProcess, place: Path
) -> None:
    """After a read the kernel asks anew, and is answered as before only where nothing changed."""
    path, other = place / "a", place / "b"
    path.write_bytes(b"bytes")
    keep(mounted, path)

    def stat_twice() -> os.stat_result:
        with open(path, "rb", buffering=0) as file:
            file.read()
            first = os.fstat(file.fileno())
            file.seek(0)
            file.read()
            assert os.fstat(file.fileno()) == first
        return first

    before = stat_twice()
    assert (before.st_size, before.st_nlink) == (5, 1)
    path.chmod(0o640)
    assert stat_twice().st_mode & 0o777 == 0o640
    os.utime(path, ns=(10**18, 2 * 10**18))
    assert (stat_twice().st_atime_ns, stat_twice().st_mtime_ns) == (10**18, 2 * 10**18)
    os.link(path, other)
    linked = stat_twice()
    assert linked.st_nlink == 2
    os.rename(other, place / "c")
    assert stat_twice().st_ctime_ns >= linked.st_ctime_ns
    (place / "c").unlink()
    assert stat_twice().st_nlink == 1
    with open(path, "rb") as file:
        (place / "d").write_bytes(b"longer")
        os.rename(place / "d", path)
        assert os.fstat(file.fileno()).st_nlink == 0
    assert stat_twice().st_size == 6
    store_at(mounted.store, b"a", b"by a client")
    assert stat_twice().st_size == 11


def test_a_directory_shows_each_change_of_a_name(mounted: MountProcess, place: Path) -> None:
    """The mount says what its attributes are by now, and is asked no more."""
    one, other = place / "one", place / "other"
    one.mkdir()
    other.mkdir()

    def changes(*directories: Path, links: int) -> None:
        for directory in directories:
            found = os.stat(directory)
            assert found.st_mtime_ns == found.st_ctime_ns > before, "shows an older state"
            assert found.st_nlink == links

    for act, changed, links in (
        (lambda: (one / "a").write_bytes(b"a"), (one,), 2),
        (lambda: os.rename(one / "a", one / "b"), (one,), 2),
        (lambda: os.rename(one / "b", other / "b"), (one, other), 2),
        (lambda: os.link(other / "b", one / "c"), (one,), 2),
        (lambda: os.unlink(one / "c"), (one,), 2),
        (lambda: os.mkfifo(one / "fifo"), (one,), 2),
        (lambda: os.symlink("b", one / "link"), (one,), 2),
        (lambda: os.mkdir(one / "below"), (one,), 3),
        (lambda: os.rename(one / "below", other / "below"), (other,), 3),
        (lambda: os.rmdir(other / "below"), (other,), 2),
    ):
        before = time.time_ns()
        act()
        changes(*changed, links=links)
    before = time.time_ns()
    store_at(mounted.store, b"one/d", b"by a client")
    wait_until(lambda: os.stat(one).st_mtime_ns > before)  # the kernel is told some time soon


def test_what_is_set_on_a_directory_is_shown_after_a_change_in_it(place: Path) -> None:
    for number in range(3):
        (place / f"{number}").write_bytes(b"x")
        os.chmod(place, 0o700 + number)
        assert os.stat(place).st_mode & 0o777 == 0o700 + number
        os.utime(place, (number, number))
        assert os.stat(place).st_mtime == number
        os.chown(place, 7, number)
        assert os.stat(place).st_gid == number


def test_what_a_client_does_is_seen_at_once(mounted: MountProcess, place: Path) -> None:
    for name in ("replaced", "evicted"):
        (place / name).write_bytes(b"old")
        keep(mounted, place / name)
    store_at(mounted.store, b"replaced", b"new")
    assert (place / "replaced").read_bytes() == b"new"
    with Client(mounted.store) as client:
        client.evict([b"evicted"])
    with pytest.raises(FileNotFoundError):
        (place / "evicted").read_bytes()


def test_a_blob_that_somebody_wrote_to_is_found(start_mount) -> None:  # type: ignore[no-untyped-def]  # as above
    mount = checked(start_mount(allow="its bytes changed"))
    data = os.urandom(64 * KIB)
    (mount.mountpoint / "a").write_bytes(data)
    keep(mount, mount.mountpoint / "a")
    (blob,) = (mount.store / "blobs").glob("*/*/*")
    with open(blob, "r+b") as file:
        file.write(bytes([data[0] ^ 1]))
    wait_until(lambda: is_refused(mount.mountpoint / "a"))  # though it is in use all the time
    assert status(mount)["counters"]["corrupt_blobs"] == 1


def test_a_blob_that_somebody_removed_is_found(start_mount) -> None:  # type: ignore[no-untyped-def]  # as above
    mount = checked(start_mount(allow="has lost its file"))
    (mount.mountpoint / "a").write_bytes(b"bytes")
    keep(mount, mount.mountpoint / "a")
    (blob,) = (mount.store / "blobs").glob("*/*/*")
    blob.unlink()
    wait_until(lambda: is_refused(mount.mountpoint / "a"))
    assert status(mount)["counters"]["missing_blobs"] == 1


def is_refused(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return True
    return False


def test_readers_in_threads_while_a_file_is_rewritten(mounted: MountProcess, place: Path) -> None:
    """Each file is one letter throughout, at each moment."""
    for turn in range(3):
        (place / "a").write_bytes(bytes([65 + turn]) * 64 * KIB)
        keep(mounted, place / "a")
        ends, seen = threading.Event(), set[bytes]()

        def read_on(ends: threading.Event = ends, seen: set[bytes] = seen) -> None:
            while not ends.is_set():
                seen.add((place / "a").read_bytes())

        with ThreadPoolExecutor(4) as executor:
            readers = [executor.submit(read_on) for _ in range(4)]
            try:
                wait_until(partial(bool, seen))
                (place / "b").write_bytes(b"x" * 64 * KIB)
                os.rename(place / "b", place / "a")
                assert (place / "a").read_bytes() == b"x" * 64 * KIB
            finally:
                ends.set()
        for reader in readers:
            reader.result()
        assert bytes([65 + turn]) * 64 * KIB in seen
        assert seen <= {bytes([65 + turn]) * 64 * KIB, b"x" * 64 * KIB}
