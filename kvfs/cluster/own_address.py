"""The address of this machine that other nodes reach, when nobody says which."""

import socket

from kvfs.errors import Unavailable
from kvfs.meta.url import parse_url, without_password


def own_address(url: str) -> str:
    """The address of this machine on its way to the metadata server."""
    error: OSError | None = None
    for place in parse_url(url).hosts or (("127.0.0.1", 6379),):
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(place)
            except OSError as failed:
                error = failed
                continue
            address = probe.getsockname()[0]
            assert isinstance(address, str)
            return f"[{address}]" if ":" in address else address
    assert error is not None
    raise Unavailable(f"{without_password(url)}: {error.strerror or error}") from error
