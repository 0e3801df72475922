"""The path rules: what is refused, and that every name can be read back."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvfs.errors import InvalidInput
from kvfs.names import (
    ChunkKeys,
    check_name,
    check_path,
    chunk_key,
    chunk_path,
    fingerprint_of,
    namespace_path,
    parse_chunk_path,
    parse_key,
    split_namespace,
)

FINGERPRINT = "0123456789abcdef" * 2
HASH = bytes(range(32))

models = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=250)


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("a", b"a"),
        (b"/kv/m@f/x", b"kv/m@f/x"),
        ("//a//b/", b"a/b"),
        ("a/..b/.c", b"a/..b/.c"),
        ("\udcff/é", b"\xff/\xc3\xa9"),
        (b"a/" + b"x" * 255, b"a/" + b"x" * 255),
    ],
)
def test_paths_have_one_form(path: bytes | str, written: bytes) -> None:
    assert check_path(path) == written
    assert check_path(written) == written


@pytest.mark.parametrize(
    "path",
    ["", "/", b"//", "a/../b", "..", "./a", b"a\0b", b"x" * 256, b"a/" * 2048 + b"b", "\ud800"],
)
def test_bad_paths_are_refused(path: bytes | str) -> None:
    with pytest.raises(InvalidInput):
        check_path(path)


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"\0", b"n" * 256])
def test_bad_names_are_refused(name: bytes) -> None:
    with pytest.raises(InvalidInput):
        check_name(name)


@given(st.binary(max_size=300))
def test_a_path_is_refused_or_its_parts_are_names(path: bytes) -> None:
    try:
        checked = check_path(path)
    except InvalidInput:
        return
    for part in checked.split(b"/"):
        check_name(part)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", b"llama"),
        ("Qwen/Qwen2.5-7B", b"Qwen%2FQwen2.5-7B"),
        (".hidden", b"%2Ehidden"),
        ("a@b%c\n", b"a%40b%25c%0A"),
        ("模型", "模型".encode()),
    ],
)
def test_model_becomes_one_component(model: str, name: bytes) -> None:
    path = namespace_path(model, FINGERPRINT)
    assert path == b"kv/" + name + b"@" + FINGERPRINT.encode()
    assert split_namespace(path) == (model, FINGERPRINT)


@given(models)
@example("/" * 74)
@example("/" * 75)
@example("a" + "/" * 200)
@example("é" * 150)
@example("a" + "é" * 150)
def test_every_model_has_a_name_that_reads_back(model: str) -> None:
    path = namespace_path(model, FINGERPRINT)
    check_path(path)
    kv, name = path.split(b"/")
    assert kv == b"kv"
    check_name(name)
    found = split_namespace(path)
    assert found is not None
    if b"%~" in name:
        start, _, digest = found[0].rpartition("~")
        assert model.startswith(start) and len(start) < len(model)
        assert len(digest) == 32
    else:
        assert found == (model, FINGERPRINT)


def test_long_models_with_one_start_stay_apart() -> None:
    long = "m" * 300
    paths = {namespace_path(model, FINGERPRINT) for model in (long, long + "x", long + "y")}
    assert len(paths) == 3


@given(st.binary(max_size=60).map(lambda tail: b"kv/" + tail))
@example(b"kv/a@" + FINGERPRINT.encode())
@example(b"kv/%2f@f")
@example(b"kv/%41@f")
@example(b"kv/.a@f")
@example(b"kv/\xff@f")
@example(b"kv/@f")
@example(b"kv/a@")
@example(b"kv/a%~00@f")
@example(b"kv/a%~" + b"0" * 32 + b"@f")
def test_only_names_that_we_write_are_namespaces(path: bytes) -> None:
    found = split_namespace(path)
    if found is not None and b"%~" not in path:
        assert namespace_path(*found) == path


@pytest.mark.parametrize(
    ("model", "fingerprint"),
    [("", "f"), ("m", ""), ("m", "a/b"), ("m", "f" * 65), ("\ud800", "f"), ("m" * 1025, "f")],
)
def test_bad_namespaces_are_refused(model: str, fingerprint: str) -> None:
    with pytest.raises(InvalidInput):
        namespace_path(model, fingerprint)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 65535), st.integers(0, 65535))
def test_keys_read_back(block_hash: bytes, group: int, shard: int) -> None:
    key = chunk_key(block_hash, group, shard)
    assert parse_key(key) == (block_hash, group, shard)
    namespace = namespace_path("a/b", FINGERPRINT)
    path = chunk_path(namespace, key)
    assert check_path(path) == path
    assert path == b"%b/%02x/%b.safetensors" % (namespace, block_hash[0], key.encode())
    assert parse_chunk_path(path) == (namespace, key)


@pytest.mark.parametrize(
    ("block_hash", "group", "shard"),
    [(b"", 0, 0), (b"h" * 65, 0, 0), (b"h", -1, 0), (b"h", 0, 65536)],
)
def test_bad_keys_are_refused(block_hash: bytes, group: int, shard: int) -> None:
    with pytest.raises(InvalidInput):
        chunk_key(block_hash, group, shard)


@pytest.mark.parametrize(
    "key",
    ["", "ab", "ab-g0", "AB-g0-s0", "abc-g0-s0", "ab-g00-s0", "ab-g0-s65536", "ab-g٣-s0",
     "ab-g0-s0\n", "../ab-g0-s0", "ab" * 65 + "-g0-s0"],
)  # fmt: skip
def test_what_is_no_key_is_none(key: str) -> None:
    assert parse_key(key) is None
    assert parse_chunk_path(b"kv/m@f/ab/" + key.encode() + b".safetensors") is None


@given(
    st.lists(st.binary(min_size=3, max_size=3), max_size=9),
    st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535)), max_size=4),
    st.integers(1, 9),
)
def test_keys_in_little_room_name_the_same_files(
    hashes: list[bytes], parts: list[tuple[int, int]], limit: int
) -> None:
    keys = ChunkKeys(b"".join(hashes), 3, tuple(parts))
    names = [b"%b.safetensors" % chunk_key(h, *part).encode() for h in hashes for part in parts]
    assert keys.file_names() == names
    assert len(keys) == len(names)
    batches = list(keys.batches(limit))
    assert [name for batch in batches for name in batch.file_names()] == names
    assert all(len(batch) <= max(limit, len(parts)) for batch in batches)


@pytest.mark.parametrize("key", ["", "a", "ab/../../x-g0-s0", "ab-g0-s0/x"])
def test_a_path_needs_a_key(key: str) -> None:
    with pytest.raises(InvalidInput):
        chunk_path(b"kv/m@f", key)


@pytest.mark.parametrize(
    "path",
    [
        b"kv/m@f/cd/ab-g0-s0.safetensors",
        b"kv/m/ab/ab-g0-s0.safetensors",
        b"kv/m@f/ab-g0-s0.safetensors",
        b"kv/m@f/ab/ab-g0-s0",
        b"/kv/m@f/ab/ab-g0-s0.safetensors",
        b"other/m@f/ab/ab-g0-s0.safetensors",
    ],
)
def test_other_paths_are_no_chunks(path: bytes) -> None:
    assert parse_chunk_path(path) is None


def test_fingerprint_sees_every_field_and_no_order() -> None:
    fields = {"model": "m", "block": 128, "layers": ["a", "b"], "fp8": False}
    one = fingerprint_of(fields)
    assert one == fingerprint_of(dict(reversed(fields.items())))
    assert one != fingerprint_of(fields | {"block": 64})
    assert one != fingerprint_of(fields | {"block": "128"})
    assert len(one) == 32
    # Fixed for ever: another value would hide what is stored.
    assert fingerprint_of({"a": 1, "b": "é"}) == FIXED


FIXED = "37f2a2bd62a2380c40e3ea3c3db2d361"


@pytest.mark.parametrize("fields", [{1: "a"}, {"a": float("nan")}, {"a": {1}}, {"a": "\ud800"}])
def test_fingerprint_refuses_what_json_cannot_hold(fields: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        fingerprint_of(fields)


@pytest.mark.parametrize("path", ["a/../b", "../b", "./b", "a/."])
def test_a_path_that_goes_up_is_refused_with_what_to_do(path: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{path}: holds .* write the path without"):
        check_path(path)
