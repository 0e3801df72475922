"""What systemd hears of a process that it started, and its journal's way of saying how bad a line
is. Without systemd all of this does nothing."""

import logging
import os
import socket
import sys

_PRIORITIES = (  # of a line, as syslog counts them
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)
_DEBUG = 7


def tell_supervisor(state: str) -> None:
    """Send a state, such as READY=1, to who started this process, if it wants to hear (sd_notify).
    A supervisor that does not listen changes nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            logging.getLogger(__name__).warning("%s: %s", address, error.strerror)


def is_in_journal() -> bool:
    """Whether standard error is read by systemd's journal."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class JournalFormatter(logging.Formatter):
    """Lines that begin with their priority; the journal has the time already."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        priority = next((p for level, p in _PRIORITIES if record.levelno >= level), _DEBUG)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())
