"""Digests of bytes in pieces: the same as of the whole, however they are cut."""

import os

import pytest
import xxhash

from kvfs.digest import digest_of
from kvfs.hashers import PieceDigest, in_background


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (5, 0, 3), (1 << 20, 7, 1 << 20), (4096,) * 50])
def test_pieces_have_the_digest_of_the_whole(sizes: tuple[int, ...]) -> None:
    whole = os.urandom(sum(sizes))
    hashing = PieceDigest()
    begin = 0
    for size in sizes:
        hashing.add(memoryview(whole)[begin : begin + size])
        begin += size
    assert hashing.digest() == digest_of(whole) == xxhash.xxh3_128(whole).digest()


def test_a_forked_child_hashes_with_threads_of_its_own() -> None:
    assert in_background(digest_of, b"parent").result() == digest_of(b"parent")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(in_background(digest_of, b"child").result(20) != digest_of(b"child"))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
