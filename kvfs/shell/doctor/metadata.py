"""Whether a store's metadata can be used, as its next start will find it.

Another process looks, since reading a damaged database can end who does (SIGBUS). It changes
nothing, and a database that a node has open is left alone: it may change under the look.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvfs.belonging import JOINING, aside_of, read_belonging
from kvfs.blob_files import subdirectories
from kvfs.daemon import child_environment
from kvfs.errors import InvalidInput
from kvfs.home import check_directory
from kvfs.mark import is_owned
from kvfs.roster import ROSTER, read_roster
from kvfs.shell.doctor.finding import Finding, Level

LOOK_DEADLINE_S = 10.0
_REBUILT = (
    "rebuilds the names of chunk files; all others are lost, unless you put back a whole copy of"
    " meta/ before"
)
_FOUND_AGAIN = "finds out what lies here; the names are on the metadata server"


def check_metadata(store: Path, *, is_running: bool) -> Iterator[Finding]:
    """What is wrong with it, and what comes of that."""
    try:
        check_directory(store)
        is_member = read_belonging(store) is not None
        directories = {store, *(known.config.path for known in read_roster(store / ROSTER))}
    except InvalidInput:
        return  # which is said of the settings or the cluster
    meta = store / "meta"
    comes = _FOUND_AGAIN if is_member else _REBUILT
    if is_running:
        yield _of_node(meta, comes)
        return
    finding = _look(meta, comes)
    if finding is None and not is_member and _is_missing(store, directories):
        finding = Finding("metadata", Level.FAIL, "there are blobs without it", _next_start(comes))
    if finding is not None and is_owned(store):  # a node has just begun, and sees to it
        finding = Finding("metadata", Level.OK, "in use by a node that starts or ends")
    yield finding or Finding("metadata", Level.OK, "can be read")


def _of_node(meta: Path, comes: str) -> Finding:
    """What a node says of the metadata that it has open."""
    if (meta / "distrusted").exists():
        advice = f"restart the node, which sets it aside and {comes}"
        return Finding("metadata", Level.FAIL, "its node has met a damaged page", advice)
    if not (meta / "data.mdb").exists():
        advice = f"read what you still need, then restart the node, which {comes}"
        return Finding("metadata", Level.FAIL, "data.mdb was removed under its node", advice)
    return Finding("metadata", Level.OK, "in use by its node")


def _look(meta: Path, comes: str) -> Finding | None:
    """What another process found; None when it found nothing wrong."""
    command = [sys.executable, "-P", "-m", __name__, str(meta)]
    try:
        ran = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOOK_DEADLINE_S,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        found = f"could not be read within {LOOK_DEADLINE_S:g} s"
        return Finding("metadata", Level.FAIL, found, "look at its disk")
    if ran.returncode < 0:
        advice = f"move {meta}/data.mdb away, so that a start does not end by it but {comes}"
        found = f"{meta}/data.mdb is damaged: who reads it is ended by signal {-ran.returncode}"
        return Finding("metadata", Level.FAIL, found, advice)
    if ran.returncode > 0:  # LMDB may be missing, which is said of the packages as well
        last = ran.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        found = f"nobody could look at it: {last or f'exit {ran.returncode}'}"
        return Finding("metadata", Level.WARN, found, "see what is said of the packages")
    said: dict[str, Any] = json.loads(ran.stdout)
    if said["unreadable"]:
        advice = "run as the store's owner, with no limit on the address space (`ulimit -v`)"
        return Finding("metadata", Level.FAIL, said["unreadable"], advice)
    if said["distrust"]:
        return Finding("metadata", Level.FAIL, said["distrust"], _next_start(comes))
    return None


def _next_start(comes: str) -> str:
    return f"the next start sets aside what there is of it, and {comes}"


def _is_missing(store: Path, directories: Iterable[Path]) -> bool:
    """Whether there is none, though something was stored. One that a join has set aside is not."""
    meta = store / "meta"
    if (meta / "data.mdb").exists() or (meta / JOINING).exists() or aside_of(store):
        return False
    places = (directory / "blobs" for directory in directories)
    return any(place.is_dir() and subdirectories(str(place)) for place in places)


def look(meta: Path) -> dict[str, str | None]:
    """What the next start of a node would say of a store's metadata."""
    from kvfs.trust import Trust

    try:
        return {"distrust": Trust(meta).distrust, "unreadable": None}
    except OSError as error:
        return {"distrust": None, "unreadable": f"{error.filename or meta}: {error.strerror}"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(Path(sys.argv[1]))))
