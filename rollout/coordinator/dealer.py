"""The DEALER of a client or an engine: the address that it dials, its keys and its options."""

from __future__ import annotations

from typing import Any

import zmq

from rollout.coordinator.security import CurveKeys as CurveKeys  # by its name here as well
from rollout.errors import ConfigError, RolloutError

LOOPBACK = "127.0.0.1"


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


def dial(
    socket: zmq.Socket[Any], address: str, max_frame_bytes: int, curve: CurveKeys | None
) -> None:
    """Set the options of a DEALER, and connect it. Raises ConfigError if `address` is none."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    # A socket has one connection: what comes over the next one answers what is sent over that.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    # A machine that is gone without a word must not leave a connection that never ends.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    if curve is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    try:
        socket.connect(address)
    except zmq.ZMQError as fault:
        raise ConfigError(f"{address!r} cannot be dialled: {fault}") from fault
