"""What every metadata engine must do for tiers."""

import stat
from collections.abc import Callable

from kvfs.meta.contract import AWAY, ROOT_INO, MetaEngine
from kvfs.meta.tier_contract import Holding, HoldingChange, TierLoad
from tests.contract.meta_words import T0, OfEngine, chunk, digest, publication


class MetaTiersSuite(OfEngine):
    """A base beside `MetaSuite`, for engines of nodes that have tiers."""

    def test_numbers_stay_whatever_the_order(self, reopen: Callable[[], MetaEngine]) -> None:
        meta = reopen()
        a, b = meta.tier_numbers([b"a", b"b"])
        assert a != b
        meta = reopen()
        assert meta.tier_numbers([b"b", b"c", b"a"])[::2] == [b, a]
        assert meta.tier_numbers([b"b"]) == [b]
        assert meta.tier_numbers([b"a"]) == [a]

    def test_a_number_that_is_given_to_another_tier_says_nothing_of_the_first(
        self, meta: MetaEngine
    ) -> None:
        numbers = meta.tier_numbers([b"%d" % n for n in range(64)])
        assert sorted(numbers) == list(range(64))
        meta.note_holdings([HoldingChange(digest(1), 5, gained=1 | 2)])
        again = meta.tier_numbers([b"%d" % n for n in range(1, 65)])
        assert again[:-1] == numbers[1:] and again[-1] == numbers[0]
        assert meta.tier_masks([digest(1)]) == [3 & ~(1 << numbers[0])]

    def test_holdings_are_summed_and_survive(self, reopen: Callable[[], MetaEngine]) -> None:
        meta = reopen()
        assert meta.tier_numbers([b"a", b"b"]) == [0, 1]
        changes = [
            HoldingChange(digest(1), 10, gained=0b01),
            HoldingChange(digest(2), 20, gained=0b11),
            HoldingChange(digest(1), 10, gained=0b01),
        ]
        meta.note_holdings(changes)
        meta = reopen()
        assert meta.tier_masks([digest(2), digest(9), digest(1)]) == [0b11, 0, 0b01]
        assert meta.tier_loads() == {0: TierLoad(2, 30), 1: TierLoad(1, 20)}
        assert meta.holdings(b"", 10) == [Holding(digest(1), 10, 1), Holding(digest(2), 20, 3)]
        assert meta.holdings(digest(1), 1) == [Holding(digest(2), 20, 3)]
        meta.note_holdings(
            [HoldingChange(digest(2), 0, lost=0b01), HoldingChange(digest(1), 0, 0, 1)]
        )
        assert meta.tier_loads() == {0: TierLoad(0, 0), 1: TierLoad(1, 20)}
        assert meta.holdings(b"", 10) == [Holding(digest(2), 20, 2)]

    def test_promises_survive_until_they_are_kept(self, reopen: Callable[[], MetaEngine]) -> None:
        meta = reopen()
        meta.promise([digest(3), digest(1), digest(2), digest(1)])
        meta = reopen()
        assert meta.promised(b"", 2) == [digest(1), digest(2)]
        assert meta.promised(digest(2), 9) == [digest(3)]
        meta.fulfil([digest(2), digest(7)])
        assert meta.promised(b"", 9) == [digest(1), digest(3)]

    def give_up(self, meta: MetaEngine, *numbers: int) -> list[bytes]:
        """As a node does it."""
        given = meta.give_up([digest(n) for n in numbers])
        meta.bury([one.digest for one in given])
        return [one.digest for one in given]

    def test_what_tiers_have_may_go_and_keeps_its_names(
        self, reopen: Callable[[], MetaEngine]
    ) -> None:
        meta = reopen()
        meta.publish([publication(n, b"f%d" % n) for n in (1, 2, 3)], T0)
        meta.note_holdings([HoldingChange(digest(n), 100 + n, gained=1) for n in (1, 3)])
        pinned = meta.resolve([b"f3"])[0]
        assert pinned is not None
        meta.set_pinned(pinned.ino, True)
        assert self.give_up(meta, 1, 2, 3) == [digest(1)]
        assert self.give_up(meta, 1) == [digest(1)]
        meta = reopen()
        meta.recover()
        assert [blob is not None for blob in meta.blobs([digest(n) for n in (1, 2, 3)])] == [
            False, True, True,
        ]  # fmt: skip
        assert meta.sizes([b"f1", b"f2", b"f3"]) == [101, 102, 103]
        assert sum(meta.usage().allocated_bytes) == 2 * 4096
        assert meta.usage().blobs == 2
        f1 = meta.resolve([b"f1"])[0]
        assert f1 is not None and meta.names_of(f1.ino) == [(ROOT_INO, b"f1")]
        assert [one.digest for one in meta.coldest(9)] == [digest(2)]
        assert meta.paths_of(f1.ino) == [b"f1"]
        assert [held.path for held in meta.held_paths(digest(1), (0, 0, b""), 9)] == [b"f1"]

    def test_a_file_that_only_tiers_have_is_a_file(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"f")], T0)
        meta.note_holdings([HoldingChange(digest(1), 101, gained=1)])
        self.give_up(meta, 1)
        f = meta.resolve([b"f"])[0]
        assert f is not None
        meta.link(f.ino, ROOT_INO, b"g", T0)
        meta.rename(ROOT_INO, b"f", ROOT_INO, b"h", T0)
        meta.restamp([(f.ino, T0 + 7)])
        meta.set_pinned(f.ino, True)
        meta.set_pinned(f.ino, False)
        assert meta.sizes([b"f", b"g", b"h"]) == [None, 101, 101]
        meta.publish([publication(2, b"g")], T0 + 8)
        assert meta.unlink(ROOT_INO, b"h", T0).nlink == 0
        meta.forget([f.ino])
        assert meta.inode(f.ino) is None
        assert meta.doomed(9) == []
        assert meta.held_paths(digest(1), (0, 0, b""), 9) == []

    def test_bytes_come_back(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"f"), publication(1, b"g")], T0)
        meta.note_holdings([HoldingChange(digest(1), 101, gained=1)])
        self.give_up(meta, 1)
        meta.intend([(digest(1), 1)])
        assert meta.add_copy(publication(1, directory=1, allocated_bytes=8192))
        [blob] = meta.blobs([digest(1)])
        assert blob is not None and (blob.directory, blob.references) == (1, 2)
        assert meta.usage().allocated_bytes[1] == 8192
        assert len(meta.coldest(9, directory=1)) == 2
        assert meta.recover().intended == ()
        assert not meta.add_copy(publication(7, directory=1))

    def test_bytes_come_back_with_a_new_name(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"f")], T0)
        meta.note_holdings([HoldingChange(digest(1), 101, gained=1)])
        self.give_up(meta, 1)
        meta.publish([publication(1, b"g")], T0 + 1)
        [blob] = meta.blobs([digest(1)])
        assert blob is not None and (blob.directory, blob.references) == (0, 2)
        assert [one.digest for one in meta.coldest(9)] == [digest(1), digest(1)]

    def test_a_lost_copy_costs_names_only_without_tiers(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"f"), publication(1, b"g")], T0)
        meta.note_holdings([HoldingChange(digest(1), 101, gained=1)])
        assert meta.lose(digest(1), T0) == []
        assert meta.blobs([digest(1)]) == [None]
        assert sum(meta.usage().allocated_bytes) == 0
        assert meta.sizes([b"f", b"g"]) == [101, 101]
        meta.note_holdings([HoldingChange(digest(1), 101, lost=1)])
        assert sorted(name for _, name, _ in meta.lose(digest(1), T0)) == [b"f", b"g"]
        assert meta.sizes([b"f", b"g"]) == [None, None]
        assert meta.usage().blobs == 0

    def test_an_interrupted_giving_up_is_finished_by_the_next_start(
        self, reopen: Callable[[], MetaEngine]
    ) -> None:
        meta = reopen()
        meta.publish([publication(1, b"f")], T0)
        meta.note_holdings([HoldingChange(digest(1), 101, gained=1)])
        meta.give_up([digest(1)])
        left = reopen().recover()
        files = {*left.intended, *((blob.digest, blob.directory) for blob in left.doomed)}
        assert files == {(digest(1), 0)}

    def test_a_chunk_whose_continuation_only_tiers_have_may_go(self, meta: MetaEngine) -> None:
        paths = [b"kv/m@f/aa/%b" % key for key in (b"a", b"b")]
        first = publication(1, paths[0], chunk=chunk(b"a"))
        second = publication(2, paths[1], chunk=chunk(b"b", b"a", 256))
        meta.publish([first, second], T0)
        meta.note_holdings([HoldingChange(digest(2), 102, gained=1)])
        self.give_up(meta, 2)
        parent = meta.resolve(paths[:1])[0]
        assert parent is not None and stat.S_ISREG(parent.mode)
        assert meta.continuations(parent.ino, 0, 9) == []
        namespace = meta.resolve([b"kv/m@f"])[0]
        assert namespace is not None
        assert len(meta.children(namespace.ino, b"a", 0, 9)) == 1

    def test_a_name_is_given_to_what_only_tiers_have(self, meta: MetaEngine) -> None:
        meta.note_holdings([HoldingChange(digest(1), 101, gained=1)])
        away = publication(1, b"d/f", directory=AWAY, allocated_bytes=0)
        meta.publish([away], T0)
        assert meta.sizes([b"d/f"]) == [101]
        assert meta.blobs([digest(1)]) == [None]
        assert meta.usage().blobs == 0
        assert meta.coldest(9) == []
        meta.publish([publication(2, b"here")], T0)
        meta.publish([publication(2, b"too", directory=AWAY, allocated_bytes=0)], T0)
        [blob] = meta.blobs([digest(2)])
        assert blob is not None and (blob.directory, blob.references) == (0, 2)
        assert meta.add_copy(publication(1, directory=1))
        [blob] = meta.blobs([digest(1)])
        assert blob is not None and (blob.directory, blob.references) == (1, 1)

    def test_uses_are_those_of_the_files_that_hold_a_blob(self, meta: MetaEngine) -> None:
        meta.publish([publication(1, b"f"), publication(1, b"g"), publication(2, b"h")], T0)
        h = meta.resolve([b"h"])[0]
        assert h is not None
        meta.set_pinned(h.ino, True)
        meta.note_holdings([HoldingChange(digest(1), 101, gained=1)])
        before = meta.uses_of([digest(9), digest(1), digest(2)])
        assert before[0] is None
        assert before[1] is not None and before[1].is_pinned is False
        assert before[2] is not None and before[2].is_pinned is True
        assert before[1].used_ns >= before[2].used_ns > 0
        self.give_up(meta, 1)
        after = meta.uses_of([digest(1)])[0]
        assert after is not None and not after.is_pinned
