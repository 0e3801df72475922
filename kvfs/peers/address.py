"""Where a node is reached: `host:port`, `[address]:port` for IPv6."""

import ipaddress
import re
from dataclasses import dataclass

from kvfs.errors import InvalidInput

_FORM = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[0-9A-Za-z._-]+)):(?P<port>\d{1,5})")
PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """A host, by name or number, and a TCP port; as text what `parse_address` reads."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_numeric(self) -> bool:
        """Whether nobody must be asked what host it is."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this host can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def bulk_port(listen: Address, written: int | None) -> int:
    """The port for the bytes of files: the one that was written, else the next one, since firewalls
    want to know it; any free one, which is 0, where `listen` leaves it open."""
    if written is not None:
        return written
    return listen.port + 1 if listen.port else 0


def parse_address(text: str) -> Address:
    """Raises `InvalidInput`. Port 0 means any free one, to who listens."""
    match = _FORM.fullmatch(text)
    if match is None or int(match["port"]) > PORT_MAX:
        raise InvalidInput(f"{text:.80}", "is no address; write host:port, or [IPv6 address]:port")
    return Address(match["six"] or match["host"], int(match["port"]))
