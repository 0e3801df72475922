"""What a kernel request ends with when its handler raises: an errno, and never the mount's end."""

import errno
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import pyfuse3

from kvfs.errors import KvfsError
from mount.errnos import errno_of

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def request(
    handler: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Turn what a handler raises into the errno that its caller gets."""

    @functools.wraps(handler)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(*args, **kwargs)
        except (KvfsError, OSError) as error:
            code = errno_of(error)
            if code == errno.EIO:
                log.error("%s: %s", handler.__name__, error)
            raise pyfuse3.FUSEError(code) from error
        except pyfuse3.FUSEError:
            raise
        except Exception as error:  # one failed request must not end the mount
            log.exception("%s failed", handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from error

    return wrapped
