"""What both ends of a channel hold each other to: sizes, queues and times, which zmq sees to."""

import zmq

from kvfs.config import PEER_FRAME_BYTES_MAX, PeerLimits


def set_bounds(
    socket: "zmq.Socket[bytes]", limits: PeerLimits, *, queued_messages_max: int
) -> None:
    """Bound a socket that is yet to be bound or connected. `queued_messages_max`: each way."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.MAXMSGSIZE, PEER_FRAME_BYTES_MAX),
        (zmq.RCVHWM, queued_messages_max),
        (zmq.SNDHWM, queued_messages_max),
        (zmq.HANDSHAKE_IVL, int(limits.handshake_s * 1000)),
        (zmq.HEARTBEAT_IVL, int(limits.heartbeat_s * 1000)),
        (zmq.HEARTBEAT_TIMEOUT, int(limits.progress_s * 1000)),
    ):
        socket.setsockopt(option, value)
