"""The address at which a node of a cluster will serve the others, while it does not run."""

import errno
import socket

from kvfs.errors import KvfsError
from kvfs.peers.address import Address, bulk_port, parse_address
from kvfs.settings.words import ClusterConfig
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
    bulk = Address(address.host, bulk_port(address, config.bulk_port))
    for place, key in ((address, "listen"), (bulk, "bulk_port")):
        try:
            _bind(place)
        except OSError as error:
            found = f"{place} cannot be listened on: {error.strerror}"
            return Finding(check, Level.FAIL, found, _advice(error, key))
    if address.is_loopback:
        found = f"{address}, which no other machine can reach"
        return Finding(check, Level.WARN, found, f"{WRITE_LISTEN}, unless all nodes are here")
    port = "any port" if address.port == 0 else f"port {address.port}"
    port += f", bytes by {'any' if bulk.port == 0 else bulk.port}"
    where = "every address of this machine" if address.host in _ANY else address.host
    return Finding(check, Level.OK, f"{where}, {port}, at its next start")


def _bind(address: Address) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address.host, address.port))


def _reachable(url: str) -> str:
    from kvfs.cluster.own_address import own_address

    return f"{own_address(url)}:0"


def _advice(error: OSError, key: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"end what listens there, or write another port in {key}"
    if error.errno == errno.EADDRNOTAVAIL:
        return "listen must have an address of this machine, or 0.0.0.0"
    if error.errno == errno.EACCES:
        return f"write a port from 1024 on in {key}"
    return WRITE_LISTEN
