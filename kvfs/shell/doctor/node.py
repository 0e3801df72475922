"""The node of a store."""

import stat
import time
from pathlib import Path

from kvfs.address import SOCKET_NAME
from kvfs.connection import Connection
from kvfs.errors import KvfsError
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
    try:
        Connection(store, time.monotonic() + CONNECT_DEADLINE_S).close()
    except PermissionError:
        advice = "run as the node's user, or set socket_mode = 0o660 in kvfs.toml"
        return True, Finding("node", Level.FAIL, f"{path}: permission denied", advice)
    except ConnectionRefusedError:
        if is_owned(store):
            return False, _DEAF
        found = "stopped; its socket is left over and will be replaced"
        return False, Finding("node", Level.OK, found)
    except TimeoutError:
        found = f"takes connections, and does not answer within {CONNECT_DEADLINE_S:g} s"
        advice = f"look at {store}/node.log; if its process is stopped, let it go on (kill -CONT)"
        return True, Finding("node", Level.FAIL, found, advice)
    except OSError as error:
        advice = f"look at {store}/node.log"
        return True, Finding("node", Level.FAIL, f"{path}: {error.strerror or error}", advice)
    except KvfsError as error:  # it is of another version, or has too many clients
        return True, Finding("node", Level.FAIL, str(error), f"look at {store}/node.log")
    return True, Finding("node", Level.OK, f"running, socket mode {stat.S_IMODE(mode):04o}")
