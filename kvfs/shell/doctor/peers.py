"""The nodes of a cluster as this one knows them, and whether they take connections."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfs.client import Client
from kvfs.errors import InvalidInput, KvfsError
from kvfs.meta.url import without_password
from kvfs.peers.address import Address, parse_address
from kvfs.shell.doctor.cluster import Joined
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.doctor.keys import check_keys
from kvfs.shell.doctor.listening import WRITE_LISTEN, check_listening
from kvfs.shell.render import count_text

ASK_DEADLINE_S = 2.0
CONNECT_DEADLINE_S = 2.0
PEERS_ASKED_MAX = 64  # at the same time, of a large cluster
_SHOWN_MAX = 5


def check_peers(store: Path, joined: Joined, *, is_running: bool) -> Iterator[Finding]:
    """What this node needs to be one of many."""
    yield check_keys(store, joined.config)
    cluster = _ask_node(store) if is_running else None
    if cluster is not None:
        yield from check_members(cluster, joined)
    elif is_running:
        found = "its node does not say of which cluster it is"
        advice = "if it was started before kvfs.toml named one, start it anew; else see node.log"
        yield Finding("peer address", Level.WARN, found, advice)
    elif joined.is_written:
        yield check_listening(joined.config)


def _ask_node(store: Path) -> Mapping[str, Any] | None:
    """What the node of the store says of its cluster; None also where it says nothing."""
    try:
        with Client(store, deadline_s=ASK_DEADLINE_S) as client:
            cluster: Mapping[str, Any] | None = client.status()["cluster"]
    except KvfsError:
        return None
    return cluster


# A node that runs ---------------------------------------------------------------------------------
def check_members(cluster: Mapping[str, Any], joined: Joined) -> Iterator[Finding]:
    """This node's own address, and those of the others; from this machine, which is what can be
    tried."""
    mine = [node for node in cluster["nodes"] if node["is_this"]]
    others = [node for node in cluster["nodes"] if not node["is_this"]]
    asked = (*mine, *others[:PEERS_ASKED_MAX])
    refused = try_addresses([node["address"] for node in asked], CONNECT_DEADLINE_S)
    yield _check_standing(cluster, joined)
    for node in mine:
        yield _check_own(node, others, refused.get(node["address"]))
    yield _check_others(others[:PEERS_ASKED_MAX], len(others), refused)


def _check_standing(cluster: Mapping[str, Any], joined: Joined) -> Finding:
    check, name = "membership", cluster["name"]
    if cluster["is_cut_off"]:
        advice = "changes fail until it reaches the metadata server again; see node.log"
        said = f": {trouble}" if (trouble := cluster.get("trouble")) else ""
        return Finding(check, Level.FAIL, f"cut off from {name}{said}", advice)
    shown = without_password(joined.config.metadata)
    if joined.is_written and (cluster["metadata"], name) != (shown, joined.config.name):
        found = f"of {name} at {cluster['metadata']}, and kvfs.toml says otherwise"
        return Finding(check, Level.WARN, found, "start the node anew to follow kvfs.toml")
    if any(node["is_this"] and node["is_leaving"] for node in cluster["nodes"]):
        return Finding(check, Level.OK, f"leaving {name}; `kvfs leave` shows how far it is")
    return Finding(check, Level.OK, f"of {name}")


def _check_own(
    node: Mapping[str, Any], others: Sequence[Mapping[str, Any]], error: str | None
) -> Finding:
    check, address = "peer address", node["address"]
    if error is not None:
        advice = "see node.log, and whether a firewall keeps this machine's own words out"
        return Finding(check, Level.FAIL, f"{address}: {error}", advice)
    elsewhere = {other["host"] for other in others} - {node["host"]}
    if parse_address(address).is_loopback and elsewhere:
        found = f"{address}, which {count_text(len(elsewhere), 'other machine')} cannot reach"
        return Finding(check, Level.FAIL, found, WRITE_LISTEN)
    return Finding(check, Level.OK, f"{address} takes connections")


def _check_others(
    asked: Sequence[Mapping[str, Any]], count: int, refused: Mapping[str, str]
) -> Finding:
    check = "peers"
    if not count:
        return Finding(check, Level.OK, "no other node is there")
    silent = [node for node in asked if node["address"] in refused]
    which = "" if len(asked) == count else f", of {count:,}"
    if not silent:
        found = f"{count_text(len(asked), 'node')}{which}: all take connections"
        return Finding(check, Level.OK, found)
    shown = ", ".join(
        f"{node['host']} ({node['address']}: {refused[node['address']]})"
        for node in silent[:_SHOWN_MAX]
    )
    more = f" and {len(silent) - _SHOWN_MAX} more" if len(silent) > _SHOWN_MAX else ""
    found = f"{len(silent)} of {count_text(len(asked), 'node')}{which} cannot be reached: {shown}"
    advice = "see their node.log, and that no firewall closes ports between the nodes"
    return Finding(check, Level.WARN, found + more, advice)


def try_addresses(addresses: Sequence[str], deadline_s: float) -> dict[str, str]:
    """Those of the numeric addresses that take no connection, and why; all are tried at once."""
    refused: dict[str, str] = {}
    end_s = time.monotonic() + deadline_s
    with selectors.DefaultSelector() as selector:
        try:
            for text in dict.fromkeys(addresses):
                _begin_connecting(text, selector, refused)
            while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    assert isinstance(key.fileobj, socket.socket)
                    code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code:
                        refused[key.data] = os.strerror(code)
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                refused[key.data] = f"no answer within {deadline_s:g} s"
                key.fileobj.close()
    return refused


def _begin_connecting(text: str, selector: selectors.BaseSelector, refused: dict[str, str]) -> None:
    try:
        address = parse_address(text)
    except InvalidInput as error:
        refused[text] = error.reason
        return
    if not address.is_numeric:
        refused[text] = "is no IP address"
        return
    probe = socket.socket(_family(address), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    code = probe.connect_ex((address.host, address.port))
    if code in (0, errno.EINPROGRESS):
        selector.register(probe, selectors.EVENT_WRITE, text)
    else:
        refused[text] = os.strerror(code)
        probe.close()


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET
