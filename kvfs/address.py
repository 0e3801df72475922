"""Where a node listens: `node.sock` in its store's first directory, however long that path is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET_NAME = "node.sock"


@contextmanager
def node_address(store: Path) -> Iterator[str]:
    """A way to the socket that any path is short enough for, to connect or to bind within the
    `with`: a socket's own path may not exceed 107 bytes. Raises OSError without the directory."""
    directory = os.open(store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)
