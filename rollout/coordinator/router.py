"""The coordinator's ROUTER socket: where it binds, for whom, and how it sends and receives."""

from __future__ import annotations

import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from rollout.errors import ConfigError

logger = logging.getLogger(__name__)

# How long a closing socket may take to hand over its last frames.
_LINGER_MS = 1000
# Frames that wait for one slow peer in the socket; a client that is slower is told again later.
_MAX_WAITING_FRAMES = 4096
# Frames that wait here for one slow engine besides: as many as its own queue holds. Its lease says
# whether it is alive; to be slow, or to get much at once, is no reason to give it up.
_MAX_KEPT_FRAMES = 2**16
_UNREACHABLE = (zmq.EHOSTUNREACH, zmq.EAGAIN)
# As integers: their enumerations take longer to combine and convert than a frame to be sent.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveServerKeys:
    """Keys of a coordinator that others than this machine can reach, as zmq.curve_keypair() makes
    them, in Z85. Peers need the public one.
    """

    public: bytes
    secret: bytes


class Router:
    """Owns the context and the socket."""

    def __init__(
        self,
        host: str,
        port: int | None,
        *,
        max_frame_bytes: int,
        curve: CurveServerKeys | None = None,
        insecure: bool = False,
    ) -> None:
        """Bind; `port` None takes a free one. Raises ConfigError if that cannot or must not be."""
        _require_safe(host, has_keys=curve is not None, insecure=insecure)
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        options: list[tuple[int, Any]] = [
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, _LINGER_MS),
            (zmq.SNDHWM, _MAX_WAITING_FRAMES),
            (zmq.MAXMSGSIZE, max_frame_bytes),
            (zmq.IPV6, int(":" in host)),
            (zmq.TCP_KEEPALIVE, 1),
        ]
        if curve is not None:
            options += [(zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, curve.secret)]
            options += [(zmq.CURVE_PUBLICKEY, curve.public)]
        for option, value in options:
            self.socket.setsockopt(option, value)
        address = f"tcp://{f'[{host}]' if ':' in host else host}:{'*' if port is None else port}"
        try:
            self.socket.bind(address)
        except zmq.ZMQError as fault:
            self.close()
            raise ConfigError(f"the coordinator cannot bind {address}: {fault}") from fault
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._kept: dict[bytes, deque[bytes]] = {}  # by identity; none is empty

    def receive(self, max_frames: int) -> Iterator[tuple[bytes, bytes]]:
        """(identity, frame) of up to `max_frames` messages that are here. A message of several
        frames is none of ours: its frame is empty.
        """
        receive = self.socket.recv
        for _ in range(max_frames):
            try:
                identity = receive(_NOBLOCK)
            except zmq.Again:
                return
            # All frames of a message come at once, and there is one behind the identity. A Frame
            # knows whether more follow; asking the socket takes longer than receiving.
            frame = receive(_NOBLOCK, copy=False)
            if not frame.more:
                yield identity, frame.bytes
                continue
            while frame.more:
                frame = receive(_NOBLOCK, copy=False)
            yield identity, b""

    def send(self, identity: bytes, frame: bytes, *, keeps: Callable[[bytes], bool]) -> bool:
        """Whether it was taken: not if the peer is not there, or too many frames wait for it.

        `keeps`: of which identities that which the socket has no room for is kept for `flush`, and
        what follows behind it.
        """
        kept = self._kept.get(identity)
        if kept is None:
            fault = self._try(identity, frame)
            if fault != zmq.EAGAIN or not keeps(identity):
                return fault is None
            kept = self._kept[identity] = deque()
        if len(kept) >= _MAX_KEPT_FRAMES:
            return False
        kept.append(frame)
        return True

    def flush(self) -> None:
        """Send of what is kept as much as there is room for. What is for a peer that has gone is
        dropped: the next message for it cannot be sent, which says so."""
        for identity, frames in list(self._kept.items()):
            fault = None
            while frames and (fault := self._try(identity, frames[0])) is None:
                frames.popleft()
            if fault != zmq.EAGAIN:
                del self._kept[identity]

    def _try(self, identity: bytes, frame: bytes) -> int | None:
        """Why the socket has not taken it, one of _UNREACHABLE; None if it has."""
        try:
            self.socket.send(identity, _MORE)
            self.socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as fault:
            if fault.errno in _UNREACHABLE:
                return fault.errno
            raise
        return None

    def close(self) -> None:
        """Hand over what waits, for a moment, and close. Twice is fine."""
        self.socket.close()
        self._context.term()


def _require_safe(host: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise ConfigError for an address that other machines can reach, unless asked for."""
    if host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError as fault:
        raise ConfigError(f"host={host!r} must be an IP address or 'localhost'") from fault
    if is_loopback or has_keys:
        return
    if not insecure:
        raise ConfigError(
            f"host={host!r} can be reached by other machines: give curve keys, or insecure=True "
            "where the network is trusted"
        )
    logger.warning("the coordinator at %s takes orders from whoever can reach it", host)
