"""The address at which a node of a cluster will serve the others, while it does not run."""

import errno
import socket

from kvfs.config import ClusterConfig
from kvfs.errors import KvfsError
from kvfs.peers.address import parse_address
from kvfs.shell.doctor.deadline import within
from kvfs.shell.doctor.finding import Finding, Level

NAME_DEADLINE_S = 2.0
WRITE_LISTEN = (
    'write listen = "ADDRESS:PORT" below [cluster], with an address that the others reach'
)
_ANY = ("0.0.0.0", "::")


def check_listening(config: ClusterConfig) -> Finding:
    """Whether the node would find its address at a start."""
    check = "peer address"
    try:
        text = config.listen or within(NAME_DEADLINE_S, lambda: _reachable(config.metadata))
        address = parse_address(text)
    except TimeoutError:
        found = "which one it is depends on the metadata server, whose name is not resolved"
        return Finding(check, Level.FAIL, found, WRITE_LISTEN)
    except (KvfsError, OSError) as error:
        return Finding(check, Level.FAIL, str(error), WRITE_LISTEN)
    with socket.socket(
        socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM
    ) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            found = f"{address} cannot be listened on: {error.strerror}"
            return Finding(check, Level.FAIL, found, _advice(error))
    if address.is_loopback:
        found = f"{address}, which no other machine can reach"
        return Finding(check, Level.WARN, found, f"{WRITE_LISTEN}, unless all nodes are here")
    port = "any port" if address.port == 0 else f"port {address.port}"
    place = "every address of this machine" if address.host in _ANY else address.host
    return Finding(check, Level.OK, f"{place}, {port}, at its next start")


def _reachable(url: str) -> str:
    from kvfs.cluster.own_address import own_address

    return f"{own_address(url)}:0"


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "end what listens there, or write another port in listen"
    if error.errno == errno.EADDRNOTAVAIL:
        return "listen must have an address of this machine, or 0.0.0.0"
    if error.errno == errno.EACCES:
        return "write a port from 1024 on in listen"
    return WRITE_LISTEN
