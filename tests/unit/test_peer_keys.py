"""Key pairs and known keys in files: made once, read strictly, never shown."""

import os
import threading
from pathlib import Path

import pytest
import zmq

from kvfs.errors import InvalidInput
from kvfs.peers.address import Address, parse_address
from kvfs.peers.keys import (
    KeyPair,
    Keys,
    check_exposure,
    encode_key,
    is_key,
    load_known,
    load_pair,
)


def test_a_pair_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "pair"
    pair = load_pair(path)
    assert load_pair(path) == pair
    assert path.stat().st_mode & 0o777 == 0o600
    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    assert os.listdir(tmp_path) == ["pair"]
    assert pair.secret not in repr(Keys(pair))


def test_of_many_that_make_a_pair_all_have_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pair"
    barrier = threading.Barrier(8, timeout=20)
    pairs: list[KeyPair] = []

    def load() -> None:
        barrier.wait()
        pairs.append(load_pair(path))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(pairs) == 8 and len(set(pairs)) == 1
    assert os.listdir(tmp_path) == ["pair"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_pair_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "pair"
    load_pair(path)
    path.chmod(mode)
    with pytest.raises(InvalidInput, match="chmod 600"):
        load_pair(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"public = x\nsecret = y\n",
        b"public = " + b"a" * 40 + b"\nsecret = " + b"b" * 40 + b"\n",
        b"x" * 10_000,
    ],
    ids=["empty", "no text", "no keys", "not of one pair", "too long"],
)
def test_a_file_that_holds_no_pair_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pair"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidInput, match=str(path)):
        load_pair(path)
    assert path.read_bytes() == content


def test_a_pair_that_cannot_be_made_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be made"):
        load_pair(tmp_path / "missing" / "pair")
    assert os.listdir(tmp_path) == []


def test_known_keys_have_names_and_comments(tmp_path: Path) -> None:
    keys = [load_pair(tmp_path / name).public for name in ("a", "b")]
    path = tmp_path / "known"
    path.write_text(f"# ours\n\n  {keys[0]}  node one \n{keys[1]}\n#\n")
    assert load_known(path) == {keys[0]: "node one", keys[1]: ""}


@pytest.mark.parametrize("line", ["short", "x" * 41, '"' * 40, "#" * 40, "é" * 40])
def test_a_line_without_a_key_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "known"
    path.write_text(f"# ours\n{line} name\n")
    with pytest.raises(InvalidInput, match=f"{path}:2"):
        load_known(path)


def test_a_pair_of_no_keys_cannot_be_made() -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    for pair in (("", ""), (public, "x"), (secret[:-1], secret)):
        with pytest.raises(InvalidInput, match="40 characters"):
            KeyPair(*pair)


def test_missing_known_keys_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_known(tmp_path / "known")


def test_a_key_has_one_text() -> None:
    public, _ = zmq.curve_keypair()
    assert is_key(public.decode())
    assert not is_key("#####" * 8)  # stands for more than 32 bytes
    assert is_key(encode_key(bytes(32))) and is_key(encode_key(b"\xff" * 32))


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "node-7.example:1"])
def test_strangers_are_not_served_by_accident(address: str) -> None:
    with pytest.raises(InvalidInput, match="insecure=True"):
        check_exposure(parse_address(address), None, insecure=False)
    check_exposure(parse_address(address), None, insecure=True)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    check_exposure(parse_address(address), Keys(KeyPair(public, secret)), insecure=False)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "127.3.2.1:0", "[::1]:0", "localhost:0"])
def test_loopback_needs_no_keys(address: str) -> None:
    check_exposure(parse_address(address), None, insecure=False)


@pytest.mark.parametrize("text", ["10.0.0.1:7", "[::1]:65535", "node-7.example:0"])
def test_addresses_are_shown_as_they_are_written(text: str) -> None:
    assert str(parse_address(text)) == text
    assert parse_address(text).is_numeric == (text[0] != "n")


@pytest.mark.parametrize(
    "text",
    ["", "host", ":1", "host:", "host:65536", "::1:5", "a b:1", "tcp://h:1", "h:1\n", "h:-1"],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="host:port"):
        parse_address(text)


def test_an_address_of_version_six_has_brackets() -> None:
    assert str(Address("fe80::1", 5)) == "[fe80::1]:5"
