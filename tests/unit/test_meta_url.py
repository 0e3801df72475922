"""Which URLs of metadata servers there are, and what is said of others."""

import pytest

from kvfs.errors import InvalidInput
from kvfs.meta.url import Form, ServerUrl, parse_url, without_password


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://here", ServerUrl(Form.SERVER, (("here", 6379),))),
        (
            "redis://me:pa%40ss@10.0.0.5:7000/3",
            ServerUrl(Form.SERVER, (("10.0.0.5", 7000),), database=3, user="me", password="pa@ss"),
        ),
        ("redis://:secret@[::1]", ServerUrl(Form.SERVER, (("::1", 6379),), password="secret")),
        ("unix:///run/redis.sock?db=2", ServerUrl(Form.SOCKET, (), "/run/redis.sock", database=2)),
        (
            "redis+sentinel://a,b:1,[::1]:2/names/4?sentinel_password=s",
            ServerUrl(
                Form.SENTINEL,
                (("a", 26379), ("b", 1), ("::1", 2)),
                service="names",
                database=4,
                sentinel_password="s",
            ),
        ),
        ("redis+cluster://a,b:7", ServerUrl(Form.CLUSTER, (("a", 6379), ("b", 7)))),
    ],
)
def test_what_a_url_says(url: str, expected: ServerUrl) -> None:
    parsed = parse_url(url)
    assert parsed.tls == {"ssl_check_hostname": True} or parsed.form is Form.SOCKET
    for name in ServerUrl.__slots__:
        if name != "tls":
            assert getattr(parsed, name) == getattr(expected, name)


def test_tls_has_options() -> None:
    url = "rediss+cluster://a?ssl_ca_certs=/ca&ssl_certfile=/c&ssl_keyfile=/k"
    parsed = parse_url(url)
    assert parsed.is_tls
    assert parsed.tls == {
        "ssl_ca_certs": "/ca",
        "ssl_certfile": "/c",
        "ssl_keyfile": "/k",
        "ssl_check_hostname": True,
    }
    unchecked = parse_url("rediss://a?ssl_cert_reqs=none").tls
    assert unchecked == {"ssl_cert_reqs": "none", "ssl_check_hostname": False}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://here", "is no such URL; write redis://host:6379"),
        ("here:6379", "is no such URL"),
        ("redis://", "names no host"),
        ("redis://a,b", "names 2 hosts, and 1 may be"),
        ("redis+cluster://" + ",".join(["a"] * 17), "names 17 hosts, and 16 may be"),
        ("redis://a:0", "'a:0' is no host:port"),
        ("redis://a:70000", "'a:70000' is no host:port"),
        ("redis://a b", "'a b' is no host:port"),
        ("redis://a/x", "'x' is no database's number"),
        ("redis://a/1/2", "too much behind the host"),
        ("redis+sentinel://a", "want a service's name"),
        ("redis+cluster://a/1", "too much behind the host"),
        ("redis+cluster://a?db=1", "a cluster has no databases"),
        ("redis://a?socket_timeout=60", "unknown option 'socket_timeout'"),
        ("redis://a?ssl_ca_certs=/x", "ssl_ca_certs is for rediss://"),
        ("redis://a?sentinel_password=x", "sentinel_password is for redis"),
        ("rediss://a?ssl_certfile=/x", "go together"),
        ("rediss://a?ssl_cert_reqs=maybe", "ssl_cert_reqs is required or none"),
        ("rediss://a?ssl_check_hostname=no", "ssl_check_hostname is true or false"),
        ("rediss://a?ssl_cert_reqs=none&ssl_check_hostname=true", "cannot be for a host"),
        ("redis://u:p#w@a", "%23"),
        ("unix://", "a socket is unix:///path"),
        ("unix:///x?ssl_ca_certs=/x", "ssl_ca_certs is for rediss://"),
    ],
)
def test_what_is_no_url(url: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=r"cluster\.metadata") as caught:
        parse_url(url, "cluster.metadata")
    assert words in caught.value.reason


def test_a_password_is_not_shown() -> None:
    url = "redis+sentinel://me:hush@a,b/names?db=1&sentinel_password=hush"
    assert without_password(url) == "redis+sentinel://a,b/names?db=1"
    assert without_password("rediss://:hush@a?ssl_password=hush") == "rediss://a"
    with pytest.raises(InvalidInput) as caught:
        parse_url("redis://me:hush@a/x")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("url", ["redis://me:hu/sh@a", "redis://me:hu?sh@a", "redis://me:hu#sh@a"])
def test_a_password_that_breaks_its_url_is_not_shown_either(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_url(url)
    assert "hu" not in str(caught.value)
