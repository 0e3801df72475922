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

from kvfs.address import SOCKET_NAME, node_address
from kvfs.config import CLIENTS_MAX
from kvfs.errors import InvalidInput, KvfsError, NamespaceError
from kvfs.node import Node
from kvfs.requests import Session, answer
from kvfs.wire import FrameDecoder, Reply, Request, decode_request, encode_reply

log = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 * 1024
_SEND_DEADLINE_S = 30.0
_ACCEPT_PAUSE_S = 0.1
# What accept(2) says when the machine is short of something, or a client has gone again.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED}
_CREDENTIALS = struct.Struct("iII")


async def serve_clients(
    node: Node, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Listen on the store's `node.sock` until cancelled; the caller owns the store's lock."""
    path = node.config.home / SOCKET_NAME
    path.unlink(missing_ok=True)
    listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with node_address(node.config.home) as address:
            await listener.bind(address)
        os.chmod(path, node.config.socket_mode)
        listener.listen(64)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                connection = await _accept(listener)
                if len(node.clients) >= CLIENTS_MAX:
                    log.warning("refused a client: %d are connected", CLIENTS_MAX)
                    connection.close()
                else:
                    nursery.start_soon(_serve_client, node, connection)
    finally:
        listener.close()
        path.unlink(missing_ok=True)


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    """The next client. Want of descriptors or memory passes, and must not end the node: it is said
    once, and tried again."""
    is_said = False
    while True:
        try:
            connection, _ = await listener.accept()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            if not is_said:
                log.warning("cannot take a client, trying again: %s", error.strerror)
                is_said = True
            await trio.sleep(_ACCEPT_PAUSE_S)
        else:
            return connection


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
        sent: list[int] = []
        try:
            result = await answer(session, request, descriptors)
            frame = encode_reply(Reply(request.number, result, len(descriptors)))
            sent = descriptors
        except KvfsError as error:  # also of an answer that fits no frame
            frame = encode_reply(Reply(request.number, None, 0, error))
        except OSError as error:
            log.warning("%s: %s", request.operation, error)
            refusal = NamespaceError(error.errno or errno.EIO)
            frame = encode_reply(Reply(request.number, None, 0, refusal))
        with trio.fail_after(_SEND_DEADLINE_S):
            await _send(connection, frame, sent)
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
