"""The coordinator's ROUTER socket: where it binds, for whom, and how it sends and receives."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from rollout.addresses import advertised_host, resolve_host, tcp_address
from rollout.coordinator.net.key_gate import KeyGate, Refusals
from rollout.coordinator.net.security import (
    CurveServerKeys,
    private_address,
    remove_private_address,
    require_safe,
)
from rollout.coordinator.protocol.codec import frames_in
from rollout.errors import ConfigError, ProtocolError

# How long a closing socket may take to send its last frames.
_LINGER_MS = 1000
# Frames that wait in the socket for one slow peer; a slower client gets them again later.
MAX_WAITING_FRAMES = 4096
# Further messages that wait here for one slow engine, as many as its own queue holds. Only its
# lease says whether it is alive: a slow engine is not given up.
MAX_KEPT_MESSAGES = 2**16
_UNREACHABLE = (zmq.EHOSTUNREACH, zmq.EAGAIN)
# Integers: combining and converting their enumerations takes longer than sending a frame.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(slots=True, eq=False)
class _Kept:
    """Waiting frames of one peer, at least one, each with its number of messages."""

    frames: deque[tuple[bytes, int]] = field(default_factory=deque)
    num_messages: int = 0


class RouterSocket:
    """Owns the context and the socket. `address`: where others dial it."""

    def __init__(
        self,
        host: str | None,
        port: int | None,
        advertise_host: str | None = None,
        *,
        max_frame_bytes: int,
        curve: CurveServerKeys | None = None,
        insecure: bool = False,
    ) -> None:
        """Bind; `port` None takes a free one. `host` None makes a socket that only processes of
        this user can reach. Raises ConfigError if binding fails, or would be unsafe.
        """
        self._kept: dict[bytes, _Kept] = {}  # by identity
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        options = [
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.LINGER, _LINGER_MS),
            (zmq.SNDHWM, MAX_WAITING_FRAMES),
            (zmq.MAXMSGSIZE, max_frame_bytes),
            (zmq.TCP_KEEPALIVE, 1),
        ]
        for option, value in options:
            self.socket.setsockopt(option, value)
        self.address, self._gate = "", None
        try:
            if curve is not None:
                self._gate = KeyGate(self._context, self.socket, curve)
            if host is None:
                self._bind_private(port, advertise_host)
            else:
                bound = resolve_host(host)
                require_safe(host, bound, has_keys=curve is not None, insecure=insecure)
                self._bind_tcp(bound, port, advertised_host(bound, advertise_host))
        except (ConfigError, zmq.ZMQError):
            self.close()
            raise

    @property
    def refusals(self) -> Refusals:
        """Connections that were refused; without keys none is."""
        return Refusals() if self._gate is None else self._gate.refusals

    def _bind_private(self, port: int | None, advertise_host: str | None) -> None:
        if port is not None or advertise_host is not None:
            raise ConfigError(
                f"port={port!r} and advertise_host={advertise_host!r} need a host, such as "
                "'127.0.0.1'"
            )
        self.address = private_address()
        self._bind(self.address)

    def _bind_tcp(self, host: str, port: int | None, advertised: str) -> None:
        self.socket.setsockopt(zmq.IPV6, int(":" in host))
        self._bind(tcp_address(host, "*" if port is None else port))
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.address = tcp_address(advertised, endpoint.rpartition(":")[2])

    def _bind(self, address: str) -> None:
        try:
            self.socket.bind(address)
        except zmq.ZMQError as fault:
            raise ConfigError(f"the coordinator cannot bind {address}: {fault}") from fault

    def receive(self, max_frames: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield (identity, frame) of the messages that have arrived, until there were `max_frames`.
        A Batch yields each of its frames. A message of several parts and an unreadable Batch yield
        one empty frame, which no message is.
        """
        receive, num_left = self.socket.recv, max_frames
        while num_left > 0:
            try:
                identity = receive(_NOBLOCK)
            except zmq.Again:
                return
            # All parts of a message arrive together, and one follows the identity. A Frame knows
            # whether more follow; asking the socket takes longer than receiving.
            frame = receive(_NOBLOCK, copy=False)
            frames: Sequence[bytes] = [b""]
            if not frame.more:
                with contextlib.suppress(ProtocolError):
                    frames = frames_in(frame.bytes)
            while frame.more:
                frame = receive(_NOBLOCK, copy=False)
            num_left -= max(1, len(frames))
            for single in frames:
                yield identity, single

    def send(
        self,
        identity: bytes,
        frame: bytes,
        num_messages: int = 1,
        *,
        keeps: Callable[[bytes], bool],
    ) -> bool:
        """Send a frame. Returns False if the peer is not connected or too many messages wait for
        it.

        `num_messages`: how many the frame has, which may be a Batch. `keeps`: says of an identity
        whether frames that the socket has no room for are kept for `flush`, and those after them.
        """
        kept = self._kept.get(identity)
        if kept is None:
            fault = self._try(identity, frame)
            if fault != zmq.EAGAIN or not keeps(identity):
                return fault is None
            kept = self._kept[identity] = _Kept()
        if kept.num_messages + num_messages > MAX_KEPT_MESSAGES:
            return False
        kept.frames.append((frame, num_messages))
        kept.num_messages += num_messages
        return True

    def flush(self) -> None:
        """Send kept frames as far as there is room. Frames for a peer that has gone are dropped:
        the next `send` to it fails and shows it to the caller."""
        for identity, kept in list(self._kept.items()):
            fault = None
            while kept.frames and (fault := self._try(identity, kept.frames[0][0])) is None:
                kept.num_messages -= kept.frames.popleft()[1]
            if fault != zmq.EAGAIN:
                del self._kept[identity]

    def _try(self, identity: bytes, frame: bytes) -> int | None:
        """Send a frame. Returns None, or the errno of _UNREACHABLE for which it was not sent."""
        try:
            self.socket.send(identity, _MORE)
            self.socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as fault:
            if fault.errno in _UNREACHABLE:
                return fault.errno
            raise
        return None

    def close(self) -> None:
        """Close, after up to _LINGER_MS for waiting frames. A second call does nothing."""
        self.socket.close()
        self._context.term()
        remove_private_address(self.address)
