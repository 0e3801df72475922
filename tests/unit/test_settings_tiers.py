"""What a person writes of tiers: a mistake is one line with tier, key and cure."""

import tomllib
from pathlib import Path

import pytest

from kvfs.config import TIERS_MAX
from kvfs.errors import InvalidInput
from kvfs.settings.load import parse_config
from kvfs.settings.sizes import Share
from kvfs.settings.words import TIER_LIMITS, Config, TierConfig, TierKind, TierLimits


def parse(text: str) -> Config:
    return parse_config(tomllib.loads(text), [Path("/store")])


def tier(text: str) -> str:
    return f'[[tiers]]\nname = "t"\n{text}\n'


def shared(text: str) -> str:
    return tier(f'kind = "shared"\npath = "/pfs/kvfs"\n{text}')


def bucket(text: str) -> str:
    return tier(f'kind = "object"\nurl = "s3://bucket/prefix"\n{text}')


def test_tiers_are_what_was_written() -> None:
    config = parse(
        """
        [[tiers]]
        name = "memory"
        kind = "memory"
        path = "/dev/shm/kvfs"

        [[tiers]]
        name = "scratch.1"
        kind = "shared"
        path = "/pfs/./kvfs/"
        min_free = "5%"
        fsync = true
        reads_max = 64
        read_deadline_s = 3

        [[tiers]]
        name = "bucket"
        kind = "object"
        url = "s3://bucket/prefix"
        endpoint = "http://127.0.0.1:9000/"
        region = "eu-central-1"
        cost_per_request = 0.001
        cost_per_gib = 2.5
        writes_max = 8
        write_deadline_s = 120.5
        """
    )
    memory, scratch, object_store = config.tiers
    assert memory == TierConfig(
        "memory", TierKind.MEMORY, TIER_LIMITS[TierKind.MEMORY], path=Path("/dev/shm/kvfs")
    )
    usual = TIER_LIMITS[TierKind.SHARED]
    limits = TierLimits(64, usual.writes_max, 3.0, usual.write_deadline_s)
    assert scratch == TierConfig(
        "scratch.1", TierKind.SHARED, limits, Path("/pfs/kvfs"), Share(0.05), fsync=True
    )
    usual = TIER_LIMITS[TierKind.OBJECT]
    limits = TierLimits(usual.reads_max, 8, usual.read_deadline_s, 120.5, 0.001, 2.5)
    assert object_store == TierConfig(
        "bucket",
        TierKind.OBJECT,
        limits,
        url="s3://bucket/prefix",
        endpoint="http://127.0.0.1:9000",
        region="eu-central-1",
    )


def test_without_any_there_are_none() -> None:
    assert parse("").tiers == ()


@pytest.mark.parametrize("url", ["s3://b", "gs://b/p", "az://account/container/p", "file:///a/b"])
def test_places_that_an_object_tier_may_have(url: str) -> None:
    [found] = parse(tier(f'kind = "object"\nurl = "{url}"')).tiers
    assert (found.url, found.path) == (url, None)


@pytest.mark.parametrize(
    ("text", "subject", "said"),
    [
        ("tiers = 5", "tiers", r"write \[\[tiers\]\]"),
        ("[tiers]\nname = 'x'", "tiers", r"write \[\[tiers\]\]"),
        ("[[tiers]]\nkind = 'nvme'\npath = '/a'", "tiers.name", "is missing"),
        ("[[tiers]]\nname = '../x'", "tiers.name", "begin with a letter"),
        ("[[tiers]]\nname = 5", "tiers.name", "begin with a letter"),
        (f"[[tiers]]\nname = '{'x' * 65}'", "tiers.name", "begin with a letter"),
        (shared("") + shared(""), "tiers.name", "'t' is there twice"),
        (tier(""), "tiers.kind of t", "is missing; write one of memory, nvme, shared, object"),
        (tier("kind = 'disk'"), "tiers.kind of t", "'disk' is none; write one of"),
        (tier("kind = 5"), "tiers.kind of t", "write one of"),
        (tier("kind = 'peer'"), "tiers.kind of t", r"found by \[cluster\]"),
        (tier("kind = 'nvme'"), "tiers.path of t", "is missing"),
        (tier("kind = 'nvme'\npath = 5"), "tiers.path of t", "is no path"),
        (tier("kind = 'nvme'\npath = 'a/b'"), "tiers.path of t", "must begin with /"),
        (shared("url = 's3://b'"), "tiers.url of t", "not for kind shared"),
        (shared("endpoint = 'http://x'"), "tiers.endpoint of t", "not for kind shared"),
        (shared("nonsense = 1"), "tiers.nonsense of t", "known are cost_per_gib"),
        (shared("fsync = 1"), "tiers.fsync of t", "neither true nor false"),
        (shared("min_free = '101%'"), "tiers.min_free of t", "between 0% and 100%"),
        (shared("min_free = -1"), "tiers.min_free of t", "write for example"),
        (shared("reads_max = 0"), "tiers.reads_max of t", "from 1 to"),
        (shared("reads_max = true"), "tiers.reads_max of t", "from 1 to"),
        (shared("writes_max = 2.0"), "tiers.writes_max of t", "from 1 to"),
        (shared("reads_max = 1000000"), "tiers.reads_max of t", "from 1 to"),
        (shared("read_deadline_s = 0"), "tiers.read_deadline_s of t", "from 0.001 to"),
        (shared("write_deadline_s = 1e9"), "tiers.write_deadline_s of t", "from 0.001 to"),
        (shared("read_deadline_s = nan"), "tiers.read_deadline_s of t", "from 0.001 to"),
        (shared("read_deadline_s = '1'"), "tiers.read_deadline_s of t", "from 0.001 to"),
        (shared("cost_per_gib = -1"), "tiers.cost_per_gib of t", "from 0 to"),
        (shared("cost_per_request = inf"), "tiers.cost_per_request of t", "from 0 to"),
        (bucket("path = '/a'"), "tiers.path of t", "not for kind object"),
        (bucket("fsync = true"), "tiers.fsync of t", "not for kind object"),
        (bucket("endpoint = 5"), "tiers.endpoint of t", "is no text"),
        (bucket("endpoint = 'ftp://x'"), "tiers.endpoint of t", "http://, https://"),
        (bucket("endpoint = 'http://me:pw@x'"), "tiers.endpoint of t", "neither credentials"),
        (bucket("endpoint = 'http://x:99999'"), "tiers.endpoint of t", "is no URL"),
        (tier("kind = 'object'"), "tiers.url of t", "is missing"),
        (tier("kind = 'object'\nurl = 'http://x/y'"), "tiers.url of t", "s3://, gs://"),
        (tier("kind = 'object'\nurl = 's3:bucket'"), "tiers.url of t", "names no place"),
        (tier("kind = 'object'\nurl = 's3://key:pw@b'"), "tiers.url of t", "AWS_ACCESS_KEY_ID"),
        (tier("kind = 'object'\nurl = 'az://a/c?sig=s'"), "tiers.url of t", "neither credentials"),
        (tier("kind = 'object'\nurl = 'file://host/x'"), "tiers.url of t", "three slashes"),
        (tier("kind = 'object'\nurl = 'file:///'"), "tiers.url of t", "names no directory"),
        (
            tier("kind = 'object'\nurl = 'file:///x'\nendpoint = 'http://x'"),
            "tiers.endpoint of t",
            "not for file:",
        ),
        (
            tier("kind = 'object'\nurl = 'gs://x'\nregion = 'x'"),
            "tiers.region of t",
            "for s3: URLs only",
        ),
    ],
)
def test_a_mistake_is_named_with_its_cure(text: str, subject: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        parse(text)
    assert caught.value.subject == subject
    assert ":pw" not in str(caught.value) and "sig" not in str(caught.value)


@pytest.mark.parametrize("path", ["/store", "/store/blobs/x", "/"])
def test_a_tier_and_a_store_lie_apart(path: str) -> None:
    with pytest.raises(InvalidInput, match="not apart from the store /store"):
        parse(tier(f'kind = "nvme"\npath = "{path}"'))


def test_two_tiers_lie_apart() -> None:
    first = '[[tiers]]\nname = "a"\nkind = "nvme"\npath = "/disk/one"\n'
    with pytest.raises(InvalidInput, match="not apart from tier a at /disk/one"):
        parse(first + '[[tiers]]\nname = "b"\nkind = "shared"\npath = "/disk/one/two"\n')
    beside = '[[tiers]]\nname = "b"\nkind = "shared"\npath = "/disk/one2"\n'
    assert len(parse(first + beside).tiers) == 2


def test_tiers_are_few() -> None:
    text = "".join(
        f'[[tiers]]\nname = "t{number}"\nkind = "nvme"\npath = "/disk/{number}"\n'
        for number in range(TIERS_MAX + 1)
    )
    with pytest.raises(InvalidInput, match=f"{TIERS_MAX} are the limit"):
        parse(text)
