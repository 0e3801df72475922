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
from kvfs.errors import InvalidInput, KvfsError, NamespaceError, Unavailable
from kvfs.node import Node
from kvfs.requests.answer import answer
from kvfs.requests.session import Session
from kvfs.wire import (
    FrameDecoder,
    Reply,
    Request,
    decode_request,
    encode_reply,
    unpack_request,
)

log = logging.getLogger(__name__)

_RECEIVE_BYTES = 256 * 1024
_SEND_DEADLINE_S = 30.0
_ACCEPT_PAUSE_S = 0.1
# What accept(2) says when the machine is short of something, or a client has gone again.
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED}
_REFUSE_DEADLINE_S = 2.0  # for a client too many to ask what it is refused
_REFUSALS_MAX = 16  # such clients at a time; more are hung up on
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
        refusals = trio.CapacityLimiter(_REFUSALS_MAX)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                connection = await _accept(listener)
                if len(node.clients) < CLIENTS_MAX:
                    # Here, not in its task: who comes next is counted with it.
                    session = _session_of(node, connection)
                    nursery.start_soon(_serve_client, session, connection)
                    continue
                log.warning("refused a client: %d are connected", CLIENTS_MAX)
                if refusals.available_tokens:
                    nursery.start_soon(_refuse_client, node, refusals, connection)
                else:
                    connection.close()
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


def _session_of(node: Node, connection: trio.socket.SocketType) -> Session:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(raw)
    session = Session(node, uid, gid)
    node.clients.add(session)
    return session


async def _refuse_client(
    node: Node, refusals: trio.CapacityLimiter, connection: trio.socket.SocketType
) -> None:
    """Say why, in answer to its first request: one that was hung up on could not tell this from a
    node that broke down."""
    reason = Unavailable(
        f"{node.config.home}: {CLIENTS_MAX} clients are connected, which is all that a node takes;"
        " end one, then try again"
    )
    decoder = FrameDecoder(unpack_request)
    with connection, trio.move_on_after(_REFUSE_DEADLINE_S):
        async with refusals:
            try:
                while data := await connection.recv(_RECEIVE_BYTES):
                    for value in decoder.feed(data):
                        refusal = Reply(decode_request(value).number, None, 0, reason)
                        await _send(connection, encode_reply(refusal), [])
                        return
            except (InvalidInput, OSError) as error:
                log.info("a client that was to be refused was lost: %s", error)


async def _serve_client(session: Session, connection: trio.socket.SocketType) -> None:
    node = session.node
    decoder = FrameDecoder(unpack_request)
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
