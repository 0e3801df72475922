"""The node's end of a client's connection, over a pair of sockets and with a scripted store."""

import trio

from kvfs import local
from kvfs.config import FRAME_BYTES_MAX
from kvfs.errors import InvalidInput
from kvfs.wire import FrameDecoder, Reply, Request, decode_reply


def test_an_answer_that_fits_no_frame_is_refused_and_the_client_stays(monkeypatch) -> None:
    async def answer(session: object, request: Request, descriptors: list[int]) -> object:
        return bytes(FRAME_BYTES_MAX) if request.operation == "paths_of" else "small"

    monkeypatch.setattr(local, "answer", answer)

    async def ask(operation: str) -> Reply:
        ours, theirs = trio.socket.socketpair()
        with ours, theirs:
            await local._answer(None, theirs, Request(1, operation, []))
            (value,) = FrameDecoder().feed(await ours.recv(65_536))
        return decode_reply(value)

    refused = trio.run(ask, "paths_of")
    assert isinstance(refused.error, InvalidInput)
    assert refused.error.subject == "reply"
    assert trio.run(ask, "stat") == Reply(1, "small")
