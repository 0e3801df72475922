"""Mounting in the words of mount(8) and fstab: `-o` options, and the calls that mount(8) makes.

`mount -t fuse.kvfs SOURCE MOUNTPOINT -o OPTIONS` runs /sbin/mount.fuse.kvfs when there is one (a
link to `kvfs`), else /sbin/mount.fuse, which runs `kvfs SOURCE MOUNTPOINT -o OPTIONS`. SOURCE is
the store's directory. What an option asks for is done, was so anyway, or is refused.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import InvalidInput

HELPERS = frozenset({"mount.fuse.kvfs", "mount.kvfs"})
SOURCE_PREFIX = "kvfs:"  # may stand before the store's directory

# Exit codes of mount(8).
USAGE = 1
MOUNT_FAILED = 32

# What the kernel is told, and what takes it back.
_FLAGS = {"ro": "rw", "noexec": "exec", "noatime": "atime", "sync": "async", "dirsync": ""}
# So anyway, whether asked for or not; `suid` and `dev` come from mount.fuse with every mount.
_ALWAYS = {
    "default_permissions", "defaults", "dev", "nodev", "nonempty", "nosuid", "suid",
    "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime",
}  # fmt: skip
# For mount(8) and systemd, which read the same line.
_OF_OTHERS = {
    "_netdev", "_rnetdev", "auto", "noauto", "fail", "nofail",
    "group", "nogroup", "owner", "noowner", "user", "nouser", "users", "nousers",
}  # fmt: skip
_OF_OTHERS_PREFIXES = ("x-", "X-", "comment=", "user=", "helper=", "uhelper=")
_IMPOSSIBLE = {
    "remount": "kvfs cannot change a mount; unmount it and mount it again",
    "bind": "this is for a directory that is mounted; leave the type out",
}
_VALUES = ("store", "config", "max_bytes", "tokenizer", "join")
_OPTION = re.compile(r'(?:\\.|"[^"]*"|[^,])+', re.DOTALL)
_ESCAPED = re.compile(r'\\(.)|"([^"]*)"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class MountOptions:
    """What `-o` asked for. `stores` follow those that are named elsewhere."""

    stores: tuple[Path, ...] = ()
    config: Path | None = None
    max_bytes: str | None = None
    tokenizer: Path | None = None
    join: str | None = None
    allow_other: bool = False
    passthrough: bool = True
    symlink: bool = False
    flags: tuple[str, ...] = ()  # for the kernel, in order


@dataclass(frozen=True, slots=True)
class HelperCall:
    """What mount(8) wants: the words of a `kvfs` command. `is_fake`: check them, and do nothing."""

    words: tuple[str, ...]
    is_fake: bool


def split_options(text: str) -> list[str]:
    """Options between commas; a backslash or double quotes keep a comma in one."""
    return [
        _ESCAPED.sub(lambda match: match[1] or match[2] or "", item)
        for item in _OPTION.findall(text)
    ]


def parse_options(text: str) -> MountOptions:
    """Raises `InvalidInput` for the first option that cannot be followed."""
    values: dict[str, list[str]] = {name: [] for name in _VALUES}
    allow_other, passthrough, symlink = False, True, False
    flags: dict[str, None] = {}
    for option in split_options(text):
        name, has_value, value = option.partition("=")
        if has_value and name in values:
            if not value:
                raise InvalidInput(f"option {option}", "has no value; write one behind the =")
            values[name].append(value)
        elif option == "allow_other":
            allow_other = True
        elif option == "no_passthrough":
            passthrough = False
        elif option == "symlink":
            symlink = True
        elif option in _FLAGS:
            flags[option] = None
        elif option in _FLAGS.values():
            flags = {flag: None for flag in flags if _FLAGS[flag] != option}
        elif option in _IMPOSSIBLE:
            raise InvalidInput(f"option {option}", _IMPOSSIBLE[option])
        elif not _is_neutral(option):
            raise InvalidInput(f"option {option}", f"kvfs has none such; it has {_known()}")
    return MountOptions(
        stores=tuple(map(Path, values["store"])),
        config=Path(values["config"][-1]) if values["config"] else None,
        max_bytes=values["max_bytes"][-1] if values["max_bytes"] else None,
        tokenizer=Path(values["tokenizer"][-1]) if values["tokenizer"] else None,
        join=values["join"][-1] if values["join"] else None,
        allow_other=allow_other,
        passthrough=passthrough,
        symlink=symlink,
        flags=tuple(flags),
    )


def _is_neutral(option: str) -> bool:
    return option in _ALWAYS | _OF_OTHERS or option.startswith(_OF_OTHERS_PREFIXES)


def _known() -> str:
    switches = ["allow_other", "no_passthrough", "symlink"]
    return ", ".join([*switches, *_FLAGS, *(f"{name}=" for name in _VALUES)])


# Called by mount(8) -------------------------------------------------------------------------------
def is_helper_call(program: str, words: Sequence[str]) -> bool:
    """Whether a process of this name and these words was started for mount(8)."""
    if program in HELPERS:
        return True
    return len(words) > 1 and ("/" in words[0] or words[0].startswith(SOURCE_PREFIX))


def parse_helper_call(words: Sequence[str]) -> HelperCall:
    """`SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`, as mount(8) says it.
    Raises `InvalidInput`."""
    places: list[str] = []
    options: list[str] = []
    letters = ""
    left = iter(words)
    for word in left:
        if word in ("-o", "-t", "-N"):
            value = next(left, None)
            if value is None:
                raise InvalidInput(word, "has no value")
            if word == "-N":
                raise InvalidInput("-N", "kvfs mounts in its own namespace; use nsenter")
            if word == "-o":
                options.append(value)
        elif word.startswith("-"):
            if not set(word[1:]) <= set("sfnvrw") or word == "-":
                raise InvalidInput(word, "is no option of mount(8)'s helpers")
            letters += word[1:]
        else:
            places.append(word)
    if len(places) != 2:
        raise InvalidInput("words", "write SOURCE MOUNTPOINT [-o OPTIONS]")
    if "r" in letters:
        options.append("ro")
    text = ",".join(option for option in options if option)
    if "s" in letters:
        text = _without_unknown(text)
    parse_options(text)
    source, mountpoint = places
    store = _store_of(source)
    asked = ("-o", text) if text else ()
    return HelperCall(("mount", "--store", store, *asked, "--", mountpoint), "f" in letters)


def _store_of(source: str) -> str:
    store = source
    if source.startswith(SOURCE_PREFIX):  # as the kernel lists a path with odd characters
        from urllib.parse import unquote_to_bytes

        store = os.fsdecode(unquote_to_bytes(source.removeprefix(SOURCE_PREFIX)))
    if not store.startswith("/"):
        raise InvalidInput(source, "is no store; name its directory from the root: /nvme/kvfs")
    return store


def _without_unknown(text: str) -> str:
    """What `mount -s` leaves: options that kvfs knows."""
    kept = []
    for item in _OPTION.findall(text):
        try:
            parse_options(item)
            kept.append(item)
        except InvalidInput:
            continue
    return ",".join(kept)
