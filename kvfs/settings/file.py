"""The file that a person writes: a small one, of TOML."""

import errno
import os
import select
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvfs.config import CONFIG_WAIT_S
from kvfs.errors import InvalidInput
from kvfs.home import FILE_KINDS

_CONFIG_BYTES_MAX = 1024 * 1024


def read_table(file: Path) -> Mapping[str, Any]:
    """Raises `InvalidInput`; FileNotFoundError is for the caller to tell."""
    import tomllib  # here: engines and most commands read no file

    try:
        raw = read_words(file)
        if len(raw) > _CONFIG_BYTES_MAX:
            raise InvalidInput(str(file), f"is no configuration: above {_CONFIG_BYTES_MAX} bytes")
        return tomllib.loads(raw.decode("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(str(file), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 or an endless number
        raise InvalidInput(str(file), f"is no TOML: {error}") from error


def read_words(file: Path) -> bytes:
    """What a file begins with, or what comes through a pipe, for whose writer it waits so long and
    no longer. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as opened:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFIFO):
            raise OSError(
                errno.EINVAL, f"it is {FILE_KINDS.get(kind, 'something else')} and no file"
            )
        words = bytearray()
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        end_s = time.monotonic() + CONFIG_WAIT_S
        while len(words) <= _CONFIG_BYTES_MAX:
            if kind == stat.S_IFIFO and not ready.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise OSError(
                    errno.ETIMEDOUT,
                    f"it is a FIFO, and nobody wrote all into it in {CONFIG_WAIT_S:g} s",
                )
            read = opened.read(_CONFIG_BYTES_MAX + 1 - len(words))
            if read == b"":
                break
            words += read or b""
        return bytes(words)
