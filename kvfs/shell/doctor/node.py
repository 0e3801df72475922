"""The node of a store."""

import socket
import stat
from pathlib import Path

from kvfs.address import SOCKET_NAME, node_address
from kvfs.mark import is_owned
from kvfs.shell.doctor.finding import Finding, Level, trouble

CONNECT_DEADLINE_S = 2.0
_DEAF = Finding(
    "node",
    Level.WARN,
    "a node has the store, and no client reaches it: it starts or ends, or its socket was removed",
    "look at node.log in the store; when it neither starts nor ends, stop it and start it again",
)


def check_node(store: Path) -> tuple[bool, Finding]:
    """Whether a node answers, and whether this user may talk to it."""
    path = store / SOCKET_NAME
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if is_owned(store):
            return False, _DEAF
        return False, Finding("node", Level.OK, "stopped; commands start one when they need it")
    except OSError as error:
        return False, trouble("node", error)
    if not stat.S_ISSOCK(mode):
        advice = f"remove {path}"
        return False, Finding("node", Level.FAIL, f"{path} is no socket", advice)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_DEADLINE_S)
        try:
            with node_address(store) as address:
                probe.connect(address)
        except PermissionError:
            advice = "run as the node's user, or set socket_mode = 0o660 in kvfs.toml"
            return True, Finding("node", Level.FAIL, f"{path}: permission denied", advice)
        except ConnectionRefusedError:
            if is_owned(store):
                return False, _DEAF
            found = "stopped; its socket is left over and will be replaced"
            return False, Finding("node", Level.OK, found)
        except OSError as error:
            advice = f"look at {store}/node.log"
            return True, Finding("node", Level.FAIL, f"{path}: {error.strerror or error}", advice)
    return True, Finding("node", Level.OK, f"running, socket mode {stat.S_IMODE(mode):04o}")
