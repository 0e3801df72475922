"""Which blobs somebody can still write to."""

from kvfs.config import OPEN_BLOBS_ENDED_MAX
from kvfs.errors import OutOfSpace
from kvfs.open_blobs import OpenBlobs

DIGEST = b"d" * 16


class Engine:
    """As much of an engine as open blobs take."""

    def __init__(self) -> None:
        self.buried: list[list[bytes]] = []
        self.is_full = False

    def bury(self, digests: list[bytes]) -> None:
        if self.is_full:
            raise OutOfSpace("full")
        self.buried.append(digests)


def test_a_blob_is_open_until_each_writer_has_gone() -> None:
    engine = Engine()
    blobs = OpenBlobs(engine)  # type: ignore[arg-type]  # as much as it takes
    blobs.begin(DIGEST)
    blobs.begin(DIGEST)
    blobs.end(DIGEST)
    blobs.write()
    assert DIGEST in blobs
    assert engine.buried == []
    blobs.end(DIGEST)
    assert DIGEST not in blobs
    blobs.write()
    assert engine.buried == [[DIGEST]]
    blobs.write()
    assert engine.buried == [[DIGEST]]


def test_one_that_is_open_again_stays_on_record() -> None:
    engine = Engine()
    blobs = OpenBlobs(engine)  # type: ignore[arg-type]  # as much as it takes
    blobs.begin(DIGEST)
    blobs.end(DIGEST)
    blobs.begin(DIGEST)
    blobs.write()
    assert engine.buried == []
    blobs.end(DIGEST)
    blobs.write()
    assert engine.buried == [[DIGEST]]


def test_no_more_stay_on_record_than_are_soon_read_again() -> None:
    engine = Engine()
    blobs = OpenBlobs(engine)  # type: ignore[arg-type]  # as much as it takes
    digests = [bytes([number]) * 16 for number in range(OPEN_BLOBS_ENDED_MAX)]
    for digest in digests:
        assert engine.buried == []
        blobs.begin(digest)
        blobs.end(digest)
    assert engine.buried == [digests]


def test_a_full_disk_leaves_it_on_record() -> None:
    engine = Engine()
    engine.is_full = True
    blobs = OpenBlobs(engine)  # type: ignore[arg-type]  # as much as it takes
    blobs.begin(DIGEST)
    blobs.end(DIGEST)
    blobs.write()
    assert DIGEST not in blobs
