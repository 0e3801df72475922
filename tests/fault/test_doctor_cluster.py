"""What the doctor says of a cluster: real servers of its names, sound and not, and real nodes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvfs.belonging import Belonging, write_belonging
from kvfs.client import Client
from kvfs.peers.keys import PAIR_NAME, load_pair
from kvfs.settings.words import ClusterConfig
from kvfs.shell.doctor import metadata_server
from kvfs.shell.doctor.cluster import Joined, cluster_of
from kvfs.shell.doctor.deadline import within
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.doctor.keys import check_keys
from kvfs.shell.doctor.listening import check_listening
from kvfs.shell.doctor.metadata_server import check_metadata_server
from kvfs.shell.doctor.peers import check_members, check_peers, try_addresses
from kvfs.shell.doctor.store import check_store
from scripts.redis_rig import USER_RIGHTS, RedisServer, find_program, free_port, redis_server
from tests.conftest import ROOT, StartNode
from tests.processes import wait_until

pytestmark = pytest.mark.skipif(
    find_program() is None, reason="redis-server is not installed: scripts/setup cluster"
)
SECRET = "Zeugnis/9"  # with a character that a URL quotes
QUOTED = "Zeugnis%2F9"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


def joined(url: str, name: str = "kvfs", *, is_written: bool = True) -> Joined:
    return Joined(ClusterConfig(url, name), is_written=is_written, is_member=not is_written)


def examined(found: Joined) -> dict[str, Finding]:
    """What is said of a server, by check; no finding that says only what is wrong."""
    findings = list(check_metadata_server(found))
    assert all(f.advice for f in findings if f.level is not Level.OK)
    assert not any("\n" in f.found or SECRET in f.found + f.advice for f in findings)
    return {finding.check: finding for finding in findings}


# The server --------------------------------------------------------------------------------------
def test_a_server_as_it_comes(server: RedisServer) -> None:
    found = examined(joined(server.url))
    assert found["metadata server"].level is Level.OK
    assert re.search(r"answers in [\d.]+ ms: redis \d", found["metadata server"].found)
    assert found["metadata changes"].level is found["metadata names"].level is Level.OK
    assert found["metadata eviction"].level is Level.OK
    assert found["metadata eviction"].found.startswith("noeviction")
    assert found["metadata on disk"].level is Level.WARN
    assert server.say("keys", "*").strip() == ""  # looking has written nothing


def test_names_that_a_member_misses_are_told(server: RedisServer) -> None:
    found = examined(joined(server.url, "nobodys", is_written=False))
    assert found["metadata names"].level is Level.WARN
    server.say("set", "{kvfs:there}:epoch", "e")
    try:
        found = examined(joined(server.url, "there", is_written=False))
    finally:
        server.say("flushall")
    assert found["metadata names"].level is Level.OK


@pytest.mark.parametrize("program", ["redis-server", "valkey-server"])
def test_a_server_that_throws_names_away(tmp_path: Path, program: str) -> None:
    if find_program(program) is None:
        pytest.skip(f"{program} is not installed")
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "yes")
    with redis_server(tmp_path / "redis", program, options) as server:
        found = examined(joined(server.url))
        assert found["metadata eviction"].level is Level.WARN
        assert "allkeys-lru" in found["metadata eviction"].found
        assert "noeviction" in found["metadata eviction"].advice
        assert (found["metadata on disk"].level, found["metadata on disk"].found) == (
            Level.OK,
            "log",
        )
        assert program.partition("-")[0] in found["metadata server"].found
        server.say("config", "set", "maxmemory-policy", "noeviction")
        server.say("config", "set", "maxmemory", "1mb")  # less than what it holds already
        assert "raise maxmemory" in examined(joined(server.url))["metadata eviction"].advice


def test_snapshots_are_a_way_to_keep(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", options=("--save", "3600 1")) as server:
        assert examined(joined(server.url))["metadata on disk"].found == "snapshots"


def test_passwords_are_told_apart_and_never_shown(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", options=("--requirepass", SECRET)) as server:
        place = server.url.removeprefix("redis://")
        assert examined(joined(f"redis://:{QUOTED}@{place}"))["metadata server"].level is Level.OK
        for wrong in (
            f"redis://{place}",
            f"redis://:hunter2@{place}",
            f"redis://x:{QUOTED}@{place}",
        ):
            found = examined(joined(wrong))
            assert [*found] == ["metadata server"]
            assert found["metadata server"].level is Level.FAIL
            assert "user:password@" in found["metadata server"].advice
            assert "hunter2" not in found["metadata server"].found
        # The password that --join had is nowhere: no failure, and what would help.
        [alone] = examined(joined(f"redis://{place}", is_written=False)).values()
        assert alone.level is Level.WARN and "metadata_file" in alone.advice


def test_a_server_that_says_a_password_again_is_not_quoted(tmp_path: Path) -> None:
    options = ("--rename-command", "AUTH", "NOAUTH_HERE")
    with redis_server(tmp_path / "redis", options=options) as server:
        place = server.url.removeprefix("redis://")
        [found] = check_metadata_server(joined(f"redis://u:{QUOTED}@{place}"))
        assert found.level is Level.FAIL and "***" in found.found
        assert SECRET not in found.found + found.advice


def test_a_user_who_may_no_more_than_needed(tmp_path: Path) -> None:
    options = (
        "--user", "kvfs", "on", ">right", "~{kvfs:kvfs}:*", *USER_RIGHTS,
        "--user", "reader", "on", ">right", "~{kvfs:kvfs}:*", "+@read", "+@connection",
    )  # fmt: skip
    with redis_server(tmp_path / "redis", options=options) as server:
        place = server.url.removeprefix("redis://")
        found = examined(joined(f"redis://kvfs:right@{place}"))
        assert {f.level for f in found.values()} == {Level.OK}
        assert "not shown" in found["metadata eviction"].found
        found = examined(joined(f"redis://reader:right@{place}"))
        assert found["metadata changes"].level is Level.FAIL
        assert "+@scripting" in found["metadata changes"].advice
        [found_other] = examined(joined(f"redis://kvfs:right@{place}", "other")).values()
        assert found_other.level is Level.FAIL and "~{kvfs:other}:*" in found_other.advice


def test_a_replica_takes_no_changes(tmp_path: Path, server: RedisServer) -> None:
    options = ("--replicaof", "127.0.0.1", str(server.port))
    with redis_server(tmp_path / "replica", options=options) as replica:
        wait_until(lambda: "master_link_status:up" in replica.say("info", "replication"))
        found = examined(joined(replica.url))
        assert found["metadata changes"].level is Level.FAIL
        assert "primary" in found["metadata changes"].advice
        wait_until(lambda: "connected_slaves:1" in server.say("info", "replication"))
        assert examined(joined(server.url))["metadata on disk"].found == "replicas"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_that_does_not_fit(tmp_path: Path, server: RedisServer) -> None:
    [found] = examined(joined(server.url.replace("redis://", "rediss://"))).values()
    assert found.level is Level.FAIL and "does not speak TLS" in found.advice
    own, key = tmp_path / "own.pem", tmp_path / "own.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", own, "-subj", "/CN=own", "-days", "2",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    port = free_port()
    secured = RedisServer(
        tmp_path / "tls",
        port,
        options=(
            "--port", "0", "--tls-port", str(port), "--tls-cert-file", str(own),
            "--tls-key-file", str(key), "--tls-ca-cert-file", str(own), "--tls-auth-clients", "no",
        ),
        client_options=("--tls", "--cacert", str(own)),
    )  # fmt: skip
    try:
        secured.start()
        url = f"rediss://127.0.0.1:{port}"
        sound = examined(joined(f"{url}?ssl_ca_certs={own}"))
        assert sound["metadata server"].level is Level.OK
        [found] = examined(joined(url)).values()
        assert found.level is Level.FAIL and "ssl_ca_certs" in found.advice
        [found] = examined(joined(f"redis://127.0.0.1:{port}")).values()
        assert found.level is Level.FAIL and "rediss://" in found.advice
        [found] = examined(joined(f"{url}?ssl_ca_certs={tmp_path}/none")).values()
        assert found.level is Level.FAIL and "none" in found.found
    finally:
        secured.kill()


def test_nobody_there(server: RedisServer) -> None:
    [found] = examined(joined(f"redis://127.0.0.1:{free_port()}")).values()
    assert found.level is Level.FAIL and "start it" in found.advice
    [found] = examined(joined("redis://...", is_written=False)).values()
    assert found.level is Level.WARN and "kvfs.toml" in found.advice


def test_a_stopped_server_is_not_waited_for(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        os.kill(server.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        [found] = examined(joined(server.url)).values()
        assert found.level is Level.FAIL
        assert time.monotonic() - began_s < metadata_server.SERVER_DEADLINE_S + 5


def test_a_server_that_never_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then is an answer to every wait of the client's."""
    monkeypatch.setattr(metadata_server, "SERVER_DEADLINE_S", 1.0)
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"+")
                while not is_over.wait(0.05):
                    connection.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
            [found] = examined(joined(url)).values()
        finally:
            is_over.set()
            dripping.join(10)
    assert found.level is Level.FAIL and "within 1 s" in found.found


def test_what_is_looked_at_within_a_bound() -> None:
    assert within(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)
    is_over = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, lambda: is_over.wait(30))
    is_over.set()


# Keys and the address -----------------------------------------------------------------------------
def test_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    config = ClusterConfig("redis://h")
    assert check_keys(tmp_path, config).level is Level.OK
    assert os.listdir(tmp_path) == []  # looking makes none
    path = tmp_path / PAIR_NAME
    pair = load_pair(path)
    sound = check_keys(tmp_path, config)
    assert sound.level is Level.OK and pair.public in sound.found
    assert pair.secret not in sound.found
    assert check_keys(tmp_path, replace(config, insecure=True)).level is Level.WARN
    path.chmod(0o640)
    found = check_keys(tmp_path, config)
    assert found.level is Level.FAIL and f"chmod 600 {path}" in found.advice
    path.chmod(0o600)
    path.write_text("public = a\nsecret = b\n")
    assert check_keys(tmp_path, config).level is Level.FAIL
    path.unlink()
    os.mkfifo(path, 0o600)
    assert check_keys(tmp_path, config).level is Level.FAIL


@pytest.mark.parametrize(
    ("listen", "level"),
    [
        ("0.0.0.0:0", Level.OK),
        ("127.0.0.1:0", Level.WARN),  # nobody else reaches it
        ("192.0.2.1:7400", Level.FAIL),  # of no machine
    ],
)
def test_where_a_node_will_listen(listen: str, level: Level) -> None:
    found = check_listening(ClusterConfig("redis://127.0.0.1", listen=listen))
    assert found.level is level
    assert found.advice or level is Level.OK


def test_a_port_that_is_taken_and_an_address_that_is_found_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = check_listening(ClusterConfig("redis://h", listen=f"127.0.0.1:{port}"))
    assert found.level is Level.FAIL and "another port" in found.advice
    assert check_listening(ClusterConfig("redis://127.0.0.1")).level is Level.WARN


# Nodes that run -----------------------------------------------------------------------------------
def member(address: str, host: str = "here", *, is_this: bool = False) -> dict[str, object]:
    return {"address": address, "host": host, "is_this": is_this, "is_leaving": False}


def said(nodes: Sequence[dict[str, object]], **more: object) -> dict[str, Finding]:
    cluster = {"name": "kvfs", "metadata": "redis://h", "is_cut_off": False, "nodes": nodes} | more
    return {f.check: f for f in check_members(cluster, joined("redis://:pw@h"))}


def test_what_a_node_says_of_its_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_ = f"127.0.0.1:{listener.getsockname()[1]}"
        shut = f"127.0.0.1:{free_port()}"
        me = member(open_, is_this=True)
        found = said([me])
        assert {f.level for f in found.values()} == {Level.OK}
        assert found["peers"].found == "no other node is there"
        assert said([me, member(open_)])["peers"].found == "1 node: all take connections"
        found = said([me, member(open_), member(shut, "there")])
        assert found["peers"].level is Level.WARN
        assert f"there ({shut}: Connection refused)" in found["peers"].found
        assert found["peer address"].level is Level.FAIL  # of the loopback, and one is elsewhere
        assert said([member(shut, is_this=True)])["peer address"].level is Level.FAIL
        assert said([me], is_cut_off=True)["membership"].level is Level.FAIL
        assert said([me], name="other")["membership"].level is Level.WARN


def test_addresses_are_tried_together_and_not_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_ = f"127.0.0.1:{listener.getsockname()[1]}"
        refused = try_addresses([open_, "name.invalid:1", "odd", open_], 5.0)
    assert sorted(refused) == ["name.invalid:1", "odd"]
    # A backlog that is full answers nothing.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        place = full.getsockname()
        callers = [socket.socket() for _ in range(4)]
        try:
            for caller in callers:
                caller.setblocking(False)
                caller.connect_ex(place)
            silent = [f"127.0.0.1:{place[1]}"]
            assert "no answer within" in try_addresses(silent, 0.2)[silent[0]]
        finally:
            for caller in callers:
                caller.close()


def test_nodes_of_a_cluster(tmp_path: Path, server: RedisServer, start_node: StartNode) -> None:
    written = f'[cluster]\nmetadata = "{server.url}"\nname = "two"\n'
    stores = [tmp_path / "a", tmp_path / "b"]
    for store in stores:
        store.mkdir()
        (store / "kvfs.toml").write_text(written)
    one, other = (start_node(store) for store in stores)

    def count(store: Path) -> int:
        with Client(store) as client:
            return len(client.status()["cluster"]["nodes"])

    wait_until(lambda: count(one.store) == 2)
    found = {finding.check: finding for finding in check_store(one.store)}
    names = ("metadata server", "metadata changes", "metadata names", "peer keys", "membership")
    for name in (*names, "peer address", "peers", "cluster", "node"):
        assert found[name].level is Level.OK, found[name]
    assert found["peers"].found == "1 node: all take connections"
    other.stop()
    one.stop()
    stopped = {finding.check: finding for finding in check_store(one.store)}
    assert stopped["peer address"].level is Level.WARN  # the server is on the loopback here
    assert "peers" not in stopped and stopped["peer keys"].level is Level.OK


def test_a_node_that_runs_alone_though_a_cluster_is_written(
    tmp_path: Path, start_node: StartNode
) -> None:
    node = start_node(tmp_path / "store")
    [keys, found] = check_peers(node.store, joined("redis://h"), is_running=True)
    assert (keys.level, found.level) == (Level.OK, Level.WARN)
    assert "start it anew" in found.advice


# The command --------------------------------------------------------------------------------------
def test_the_command_says_it_and_no_password(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "meta").mkdir(parents=True)
    (store / "store.json").write_text("{}")
    assert cluster_of(store) is None
    with redis_server(tmp_path / "redis", options=("--requirepass", "other")) as server:
        url = server.url.replace("redis://", f"redis://:{QUOTED}@")
        (store / "kvfs.toml").write_text(f'[cluster]\nmetadata = "{url}"\n')
        for words in ((), ("--json",)):
            ran = subprocess.run(
                [sys.executable, "-m", "kvfs", "doctor", "--store", store, *words],
                check=False, capture_output=True, text=True, cwd=ROOT, timeout=60,
            )  # fmt: skip
            assert ran.returncode == 1
            assert not {SECRET, QUOTED} & {*ran.stdout.split(), *ran.stderr.split()}
            assert SECRET not in ran.stdout + ran.stderr and QUOTED not in ran.stdout + ran.stderr
            assert "refuses user or password" in ran.stdout
    [found] = [f for f in json.loads(ran.stdout)["findings"] if f["check"] == "metadata server"]
    assert (found["level"], found["store"]) == ("fail", str(store))


def test_what_a_store_says_that_only_a_command_line_joined(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    write_belonging(tmp_path, Belonging("one", "redis://host:6379", bytes(16)))
    found = cluster_of(tmp_path)
    assert found == Joined(
        ClusterConfig("redis://host:6379", "one"), is_written=False, is_member=True
    )
    (tmp_path / "kvfs.toml").write_text('[cluster]\nmetadata = "redis://:pw@h"\nname = "two"\n')
    found = cluster_of(tmp_path)
    assert found is not None and found.is_written and not found.is_member
    (tmp_path / "meta" / "cluster").write_text("{}")
    assert cluster_of(tmp_path) is None
