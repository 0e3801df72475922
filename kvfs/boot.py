"""Which start of the machine this is."""

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Another one after each start of the machine; the same in all its containers."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
