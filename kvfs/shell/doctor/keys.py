"""The key pair by which the other nodes of a cluster know this one."""

import stat
from pathlib import Path

from kvfs.errors import InvalidInput
from kvfs.settings.words import ClusterConfig
from kvfs.shell.doctor.finding import Finding, Level


def check_keys(store: Path, config: ClusterConfig) -> Finding:
    """There, whole, and for its owner's eyes only; or made at the first start."""
    check = "peer keys"
    try:
        from kvfs.peers.keys import PAIR_NAME, read_pair
    except ImportError as error:
        advice = "install what kvfs depends on: pip install pyzmq"
        return Finding(check, Level.FAIL, f"cannot be read: {error}", advice)
    path = store / PAIR_NAME
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would wait for ever
            return Finding(check, Level.FAIL, f"{path} is no file", "move it away")
        pair = read_pair(path)
    except FileNotFoundError:
        return Finding(check, Level.OK, "are made at its first start")
    except OSError as error:
        advice = "run as the store's owner"
        return Finding(check, Level.FAIL, f"{path}: {error.strerror}", advice)
    except InvalidInput as error:
        advice = f"no node of a cluster starts before this is mended: {_mend(error)}"
        return Finding(check, Level.FAIL, str(error), advice)
    if config.insecure:
        advice = "take insecure = true away where anybody else reaches the network"
        return Finding(check, Level.WARN, "not used: whoever asks is served", advice)
    return Finding(check, Level.OK, f"readable by their owner only; public {pair.public}")


def _mend(error: InvalidInput) -> str:
    if "may be read by others" in error.reason:
        return f"chmod 600 {error.subject}; make a new pair if others have read it"
    if "belongs to user" in error.reason:
        return "run as that user, or give the file to who runs the node"
    return "restore the file, or move it away, and a new pair is made"
