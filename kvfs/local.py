"""The node's Unix socket: clients ask in batches, and get descriptors instead of bytes.

One task a connection, one request at a time on it. A client that vanishes takes its stages with it.
A malformed frame costs the sender its connection and nothing else; a request that breaks a rule is
refused with the reason.
"""

import array
import errno
import logging
import os
import socket
import struct

import trio

from kvfs.config import CLIENTS_MAX
from kvfs.errors import InvalidInput, KvfsError, NamespaceError
from kvfs.node import Node
from kvfs.requests import Session, answer
from kvfs.wire import FrameDecoder, Reply, Request, decode_request, encode_reply

log = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 * 1024
_SEND_DEADLINE_S = 30.0
_CREDENTIALS = struct.Struct("iII")


async def serve_clients(
    node: Node, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Listen on the store's `node.sock` until cancelled; the caller owns the store's lock."""
    path = node.config.home / "node.sock"
    path.unlink(missing_ok=True)
    listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, os.fspath(path.parent), path.name)
        os.chmod(path, node.config.socket_mode)
        listener.listen(64)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                connection, _ = await listener.accept()
                if len(node.clients) >= CLIENTS_MAX:
                    log.warning("refused a client: %d are connected", CLIENTS_MAX)
                    connection.close()
                else:
                    nursery.start_soon(_serve_client, node, connection)
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _bind(listener: trio.socket.SocketType, directory: str, name: str) -> None:
    """Bind by way of /proc, since a socket's path may not exceed 107 bytes."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        raw = socket.socket(fileno=os.dup(listener.fileno()))
        with raw:
            raw.bind(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)


async def _serve_client(node: Node, connection: trio.socket.SocketType) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(raw)
    session = Session(node, uid, gid)
    node.clients.add(session)
    decoder = FrameDecoder()
    try:
        while data := await connection.recv(_RECEIVE_BYTES):
            for value in decoder.feed(data):
                await _answer(session, connection, decode_request(value))
    except InvalidInput as error:
        log.info("closed a client's connection: %s", error)
    except (OSError, trio.TooSlowError) as error:
        log.info("lost a client: %s", error)
    except Exception:
        # The edge of a session: a fault in one request must not take the mount and all others down.
        log.exception("a request failed; its client is disconnected")
    finally:
        connection.close()
        node.clients.discard(session)
        session.close()


async def _answer(session: Session, connection: trio.socket.SocketType, request: Request) -> None:
    descriptors: list[int] = []
    try:
        try:
            result = await answer(session, request, descriptors)
            reply = Reply(request.number, result, len(descriptors))
        except KvfsError as error:
            reply = Reply(request.number, None, 0, error)
        except OSError as error:
            log.warning("%s: %s", request.operation, error)
            reply = Reply(request.number, None, 0, NamespaceError(error.errno or errno.EIO))
        sent = [] if reply.error is not None else descriptors
        with trio.fail_after(_SEND_DEADLINE_S):
            await _send(connection, encode_reply(reply), sent)
    finally:
        for fd in descriptors:
            os.close(fd)


async def _send(connection: trio.socket.SocketType, frame: bytes, descriptors: list[int]) -> None:
    rest = memoryview(frame)
    if descriptors:
        rights = array.array("i", descriptors)
        sent = await connection.sendmsg([rest], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        rest = rest[sent:]
    while rest:
        rest = rest[await connection.send(rest) :]
