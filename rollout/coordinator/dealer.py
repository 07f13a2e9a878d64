"""The DEALER of a client or an engine: where it dials, how, and what it takes from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from rollout.coordinator.protocol.messages import ALLOWED, Message, Role, decode
from rollout.coordinator.security import CurveKeys as CurveKeys  # by its name here as well
from rollout.errors import ConfigError, ProtocolError, RolloutError

LOOPBACK = "127.0.0.1"
# How long a closing socket may take to hand over its last frames.
LINGER_MS = 500
_RECONNECT_MS, _MAX_RECONNECT_MS = 50, 1000


class CoordinatorLostError(RolloutError):
    """The coordinator does not answer, has gone, or has forgotten what was asked of it."""

    is_transient = True


def address_of(port_or_address: int | str) -> str:
    """Return the address of a port on loopback, or a full tcp:// or ipc:// address as it is. Raises
    ConfigError.
    """
    if isinstance(port_or_address, str) and "://" in port_or_address:
        return port_or_address
    text = str(port_or_address)
    if isinstance(port_or_address, bool) or not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ConfigError(
            f"{port_or_address!r} must be a port in [1, 65535], or an address such as "
            f"'tcp://{LOOPBACK}:5555'"
        )
    return f"tcp://{LOOPBACK}:{text}"


def configure(socket: zmq.Socket[Any], max_frame_bytes: int, curve: CurveKeys | None) -> None:
    """Set the options of a DEALER that is not connected yet."""
    socket.setsockopt(zmq.LINGER, 0)  # until the last close: nothing outlives its session
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
    # A machine that is gone without a word must not leave a connection that never ends.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    if curve is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)


def dial(socket: zmq.Socket[Any], address: str) -> None:
    """Connect. Raises ConfigError if `address` is none."""
    try:
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.connect(address)
    except zmq.ZMQError as fault:
        raise ConfigError(f"{address!r} cannot be dialled: {fault}") from fault


def redial(socket: zmq.Socket[Any], address: str) -> None:
    """Connect anew. What has not come over the old connection yet never will, so that what comes
    now answers what is sent now.
    """
    socket.disconnect(address)
    dial(socket, address)


def message_in(frames: Sequence[bytes], max_frame_bytes: int) -> Message:
    """Return the coordinator's message. Raises ProtocolError, whatever the frames."""
    if len(frames) != 1:
        raise ProtocolError(f"a message is one frame, got {len(frames)}")
    message = decode(frames[0], max_frame_bytes)
    if type(message) not in ALLOWED[Role.COORDINATOR]:
        raise ProtocolError(f"{type(message).__name__} is no message of a coordinator")
    return message
