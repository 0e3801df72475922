"""Where the metadata server may be, and who may talk to it: users, TLS, Sentinels, clusters."""

import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from kvfs.errors import InvalidInput, KvfsError, Unavailable
from kvfs.meta.contract import ROOT_INO, MetaEngine
from kvfs.meta.redis import RedisEngine
from scripts.redis_groups import Sharded, sharded_servers, watched_servers
from scripts.redis_rig import USER_RIGHTS, RedisServer, find_program, free_port, redis_server
from tests.contract.clusters import reopening
from tests.contract.meta_suite import MetaSuite
from tests.contract.meta_words import FILE, T0, publication
from tests.processes import wait_until

PROGRAMS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(find_program(name) is None, reason=f"{name} is not installed"),
    )
    for name in ("redis-server", "valkey-server")
]


@contextmanager
def joined(directory: Path, url: str, cluster: str = "c") -> Iterator[RedisEngine]:
    node_id = secrets.token_bytes(16)
    engine = RedisEngine.join(directory / node_id.hex(), url, cluster, node_id, now_ns=T0)
    try:
        yield engine
    finally:
        engine.close()


def names_of(engine: RedisEngine) -> list[bytes]:
    return [entry.name for entry in engine.entries(ROOT_INO, b"", 1000)]


def try_to(act: Callable[[], object]) -> bool:
    """Whether it went; False when the server was not there."""
    try:
        act()
    except Unavailable:
        return False
    return True


def is_quick(act: Callable[[], object], most_s: float = 10.0) -> bool:
    """`try_to`, which does not hang either way."""
    begun_s = time.monotonic()
    went = try_to(act)
    assert time.monotonic() - begun_s < most_s
    return went


@pytest.mark.parametrize("program", PROGRAMS)
def test_users_and_passwords(tmp_path: Path, program: str) -> None:
    options = (
        "--user",
        "kvfs",
        "on",
        ">right",
        "~{kvfs:*",
        *USER_RIGHTS,
        "--requirepass",
        "default's",
    )
    with redis_server(tmp_path / "server", program, options) as server:
        address = f"127.0.0.1:{server.port}"
        url = f"redis://kvfs:right@{address}"
        with joined(tmp_path, url) as a, joined(tmp_path, url) as b:
            a.publish([publication(1, b"d/f")], T0)
            b.catch_up()
            assert b.sizes([b"d/f"]) == [101]
            a.unlink(a.make_directories(b"d", 0o755, 0, 0, T0).ino, b"f", T0)
            assert b.wait_news()
        with joined(tmp_path, f"redis://:default%27s@{address}", "other") as c:
            assert names_of(c) == []
        for refused in (f"redis://kvfs:wrong@{address}", f"redis://x:right@{address}"):
            with pytest.raises(InvalidInput, match=r"refuses user or password: .*username-pass"):
                RedisEngine.join(tmp_path / "r", refused, "c", bytes(16))
        with pytest.raises(InvalidInput, match=r"refuses user or password: .*[Aa]uthentication"):
            RedisEngine.join(tmp_path / "r", f"redis://{address}", "c", bytes(16))


def test_a_user_who_may_too_little(tmp_path: Path) -> None:
    options = ("--user", "kvfs", "on", ">right", "~*", "+@read", "+@connection")
    with (
        redis_server(tmp_path / "server", options=options) as server,
        pytest.raises(InvalidInput, match=r"does not allow this user enough: .*evalsha"),
    ):
        RedisEngine.join(
            tmp_path / "r", f"redis://kvfs:right@127.0.0.1:{server.port}", "c", bytes(16)
        )


# TLS ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate for 127.0.0.1, and a node's; in one directory."""
    made = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=made, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for who in ("ca", "stranger"):
        openssl("req", "-x509", *new_key, "-keyout", f"{who}.key", "-out", f"{who}.pem",
                "-subj", f"/CN={who}", "-days", "2")  # fmt: skip
    for who in ("server", "node"):
        (made / f"{who}.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl("req", *new_key, "-keyout", f"{who}.key", "-out", f"{who}.csr",
                "-subj", f"/CN={who}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{who}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-out", f"{who}.pem", "-days", "2",
                "-extfile", f"{who}.ext")  # fmt: skip
    return made


@pytest.fixture(scope="module")
def tls_server(
    certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    port = free_port()
    own = [f"{certificates}/{name}" for name in ("ca.pem", "server.pem", "server.key")]
    server = RedisServer(
        tmp_path_factory.mktemp("tls"),
        port,
        options=(
            "--port", "0", "--tls-port", str(port), "--tls-ca-cert-file", own[0],
            "--tls-cert-file", own[1], "--tls-key-file", own[2],
        ),
        client_options=("--tls", "--cacert", own[0], "--cert", own[1], "--key", own[2]),
    )  # fmt: skip
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_tls_with_an_authority_and_a_certificate_of_ones_own(
    tmp_path: Path, certificates: Path, tls_server: RedisServer
) -> None:
    there = f"rediss://127.0.0.1:{tls_server.port}"
    mine = f"&ssl_certfile={certificates}/node.pem&ssl_keyfile={certificates}/node.key"
    url = f"{there}?ssl_ca_certs={certificates}/ca.pem{mine}"
    with joined(tmp_path, url) as a:
        a.publish([publication(1, b"f")], T0)
        assert names_of(a) == [b"f"]
    with joined(tmp_path, f"{there}?ssl_cert_reqs=none{mine}") as b:
        assert names_of(b) == [b"f"]
    for wrong, words in (
        (f"{there}?ssl_ca_certs={certificates}/stranger.pem{mine}", "certificate is not trusted"),
        (f"{there}?x=1", "unknown option 'x'"),
        (f"{there}?ssl_ca_certs={certificates}/none.pem", "ssl_ca_certs: .*No such file"),
        (f"{there}?ssl_ca_certs={certificates}/ca.key", "certificates cannot be used"),
        (
            f"{there}?ssl_certfile={certificates}/node.pem&ssl_keyfile={certificates}/ca.key",
            "certificates cannot be used: .*mismatch",
        ),
    ):
        with pytest.raises(InvalidInput, match=words):
            RedisEngine.join(tmp_path / "r", wrong, "c", bytes(16))
    for wrong in (
        f"{there}?ssl_ca_certs={certificates}/ca.pem",  # without a certificate of this node's
        f"redis://127.0.0.1:{tls_server.port}",
    ):
        with pytest.raises(Unavailable, match="does not answer"):
            RedisEngine.join(tmp_path / "r", wrong, "c", bytes(16))


# Sentinels ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_node_follows_the_sentinels(tmp_path: Path, program: str) -> None:
    with (
        watched_servers(tmp_path / "servers", program) as servers,
        joined(tmp_path, servers.url) as a,
        joined(tmp_path, servers.url) as b,
    ):
        a.publish([publication(1, b"before")], T0)
        wait_until(lambda: "lag=0" in servers.primary.say("info", "replication"))
        servers.sentinels[0].kill()
        servers.primary.kill()
        assert not is_quick(lambda: a.make(ROOT_INO, b"g", FILE, 0, 0, T0))
        assert a.resolve([b"before"]) != [None]  # what it has, it knows
        wait_until(lambda: is_quick(lambda: a.publish([publication(2, b"after")], T0)), 60)
        wait_until(lambda: try_to(b.catch_up))
        assert names_of(b) == [b"after", b"before"]
        assert servers.replica.say("role").startswith("master")


def test_what_sentinels_do_not_know(tmp_path: Path) -> None:
    nobody = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/names"
    with pytest.raises(Unavailable, match="no Sentinel knows a primary of 'names'"):
        RedisEngine.join(tmp_path / "r", nobody, "c", bytes(16))


# Clusters ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sharded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if find_program("valkey-server") is None:
        pytest.skip("valkey-server is not installed")
    with sharded_servers(tmp_path_factory.mktemp("servers"), "valkey-server") as servers:
        yield servers.url


class TestSharded(MetaSuite):
    """The contract on a cluster of servers, of the other program."""

    @pytest.fixture
    def reopen(self, tmp_path: Path, sharded_url: str) -> Iterator[Callable[[], MetaEngine]]:
        with reopening(tmp_path / "meta", sharded_url) as reopen:
            yield reopen


@pytest.fixture(params=PROGRAMS)
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sharded]:
    with sharded_servers(tmp_path / "servers", request.param) as servers:
        yield servers


def test_a_node_finds_its_slot_and_follows_it(tmp_path: Path, sharded: Sharded) -> None:
    for server in (*sharded.primaries, sharded.replica):
        server.say(
            "acl", "setuser", "kvfs", "on", ">right", "~{kvfs:*", *USER_RIGHTS, "+cluster|slots"
        )
    as_user = sharded.url.replace("://", "://kvfs:right@")
    with joined(tmp_path, as_user) as a, joined(tmp_path, sharded.url) as b:
        a.publish([publication(1, b"kv/m/00/1")], T0)
        b.catch_up()
        assert b.sizes([b"kv/m/00/1"]) == [101]
        a.make(ROOT_INO, b"g", FILE, 0, 0, T0)
        assert b.wait_news()
        b.catch_up()
        wait_until(lambda: "lag=0" in sharded.primaries[0].say("info", "replication"))
        sharded.primaries[0].kill()
        assert not is_quick(lambda: a.make(ROOT_INO, b"h", FILE, 0, 0, T0))
        wait_until(lambda: is_quick(lambda: a.publish([publication(2, b"after")], T0)), 60)
        wait_until(lambda: try_to(b.catch_up))
        assert names_of(b) == [b"after", b"g", b"kv"]
        assert sharded.replica.say("role").startswith("master")
    with pytest.raises(InvalidInput, match=r"is one of a cluster: write redis\+cluster://"):
        RedisEngine.join(
            tmp_path / "r", f"redis://127.0.0.1:{sharded.primaries[1].port}", "c", bytes(16)
        )


def test_a_slot_that_moves_is_never_written_in_part(tmp_path: Path, sharded: Sharded) -> None:
    source, target = sharded.primaries[:2]
    slot = key_slot(b"{kvfs:c}:")
    with joined(tmp_path, sharded.url) as a, redis.Redis(port=source.port) as client:
        a.make(ROOT_INO, b"old", FILE, 0, 0, T0)
        before = contents(client)
        target.say("cluster", "setslot", str(slot), "importing", sharded.node_id(source))
        source.say("cluster", "setslot", str(slot), "migrating", sharded.node_id(target))
        with pytest.raises(Unavailable, match="slot is being moved"):
            a.make(ROOT_INO, b"new", FILE, 0, 0, T0)
        assert contents(client) == before
        client.migrate("127.0.0.1", target.port, list(before), 0, 5000)
        for server in (target, source, sharded.primaries[2]):
            server.say("cluster", "setslot", str(slot), "node", sharded.node_id(target))
        wait_until(lambda: is_quick(lambda: a.make(ROOT_INO, b"new", FILE, 0, 0, T0)))
        assert names_of(a) == [b"new", b"old"]
        assert contents(client) == {}


def contents(client: "redis.Redis") -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.scan_iter()}  # type: ignore[union-attr,misc]


def test_a_server_that_is_no_cluster(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "server") as server,
        pytest.raises(KvfsError, match="cluster support disabled"),
    ):
        RedisEngine.join(tmp_path / "r", f"redis+cluster://127.0.0.1:{server.port}", "c", bytes(16))
