"""From a request to its handler, and the result."""

from typing import Any

from kvfs.errors import InvalidInput
from kvfs.requests import about, keeping, listing, locating, reading, storing
from kvfs.requests.session import Operations, Session
from kvfs.wire import Request

_KINDS = (about, reading, locating, storing, listing, keeping)
_OPERATIONS: Operations = {
    name: operation for kind in _KINDS for name, operation in kind.OPERATIONS.items()
}
assert len(_OPERATIONS) == sum(len(kind.OPERATIONS) for kind in _KINDS), "one name, two handlers"


async def answer(session: Session, request: Request, descriptors: list[int]) -> Any:
    """Do what a client asks; the result. Descriptors for the client are added to `descriptors`, and
    are the caller's to close. Raises `KvfsError` and OSError."""
    handler = _OPERATIONS.get(request.operation)
    if handler is None:
        raise InvalidInput(
            request.operation[:80], "no such operation; client and node differ in version"
        )
    kinds, function = handler
    arguments = request.arguments
    if len(arguments) != len(kinds) or any(
        type(value) is not kind for value, kind in zip(arguments, kinds, strict=True)
    ):
        raise InvalidInput(request.operation, "wrong arguments; client and node differ in version")
    session.node.refresh()
    await session.node.settle()
    return await function(session, arguments, descriptors)
