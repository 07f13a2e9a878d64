"""The ZeroMQ sockets of a fleet: the coordinator's ROUTER and the DEALER of each peer.

Used by `rollout.coordinator.coordinator` and `rollout.coordinator.net.link`. `address_of` is also
used by `rollout.coordinator.client.inference_client` and `rollout.apis.async_llm`. The sockets
carry frames and do not decode messages. The module opens network and Unix sockets.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout.addresses import LOOPBACK, advertised_host, resolve_host, tcp_address
from rollout.coordinator.net.key_gate import KeyGate, Refusals
from rollout.coordinator.net.security import (
    HANDSHAKE_FAULTS,
    CurveKeys,
    CurveServerKeys,
    private_address,
    remove_private_address,
    require_safe,
)
from rollout.coordinator.protocol.codec import frames_in
from rollout.errors import ConfigError, ProtocolError


class SelfPipe:
    """A pair of sockets that ends a poller's wait from another thread or a signal handler. Register
    `descriptor` with the poller. The descriptor is readable after `wake` until the next `drain`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.descriptor = self._reader.fileno()

    def wake(self) -> None:
        # A full buffer wakes the poller already; a closed socket has no poller.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


# ---- the coordinator's ROUTER

# How long a closing socket may take to send its last frames.
_LINGER_MS = 1000
# Frames that wait in the socket for one slow peer; a slower client gets them again later.
MAX_WAITING_FRAMES = 4096
# Further messages that wait here for one slow engine, as many as its own queue holds. Only its
# lease says whether it is alive: a slow engine is not removed.
MAX_KEPT_MESSAGES = 2**16
_UNREACHABLE = (zmq.EHOSTUNREACH, zmq.EAGAIN)
# Integers: combining and converting their enumerations takes longer than sending a frame.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(slots=True, eq=False)
class _Kept:
    """Frames that wait for a slow peer, at least one, each with its number of messages."""

    frames: deque[tuple[bytes, int]] = field(default_factory=deque)
    num_messages: int = 0


class RouterSocket:
    """The coordinator's ROUTER socket, and its ZeroMQ context. Peers connect to `address`."""

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
        """Bind the socket. Raises ConfigError if the socket cannot be bound or is unsafe. `port`
        None takes a free port. `host` None makes a Unix socket that only this user can reach."""
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
        """Number of refused connections by reason. All are 0 without keys."""
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
        """Yield (sender's identity, frame) for frames that have arrived, up to `max_frames`. All
        frames of a Batch are yielded, even beyond `max_frames`. An unreadable Batch or a ZeroMQ
        message of several parts yields one empty frame."""
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
        """Send a frame, or keep it for `flush`.

        Returns False if the peer is not connected, or if too many messages wait for it. The frame
        is then neither sent nor kept. `num_messages` is the number of messages in the frame.
        `keeps` returns whether frames for an identity are kept while the socket has no room for
        them."""
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
        """Send kept frames while the socket has room. Kept frames of a peer that has disconnected
        are dropped."""
        for identity, kept in list(self._kept.items()):
            fault = None
            while kept.frames and (fault := self._try(identity, kept.frames[0][0])) is None:
                kept.num_messages -= kept.frames.popleft()[1]
            if fault != zmq.EAGAIN:
                del self._kept[identity]

    def _try(self, identity: bytes, frame: bytes) -> int | None:
        """Send a frame. Returns None, or an errno in _UNREACHABLE if the frame was not sent."""
        try:
            self.socket.send(identity, _MORE)
            self.socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as fault:
            if fault.errno in _UNREACHABLE:
                return fault.errno
            raise
        return None

    def close(self) -> None:
        """Close the socket, and remove the directory of a private address. Waits up to _LINGER_MS
        for frames to be sent. A second call does nothing."""
        self.socket.close()
        self._context.term()
        remove_private_address(self.address)


# ---- a peer's DEALER


def address_of(port_or_address: int | str) -> str:
    """Return the tcp:// address of a port on loopback, or a full tcp:// or ipc:// address
    unchanged. Raises ConfigError for anything else."""
    if isinstance(port_or_address, str) and "://" in port_or_address:
        return port_or_address
    text = str(port_or_address)
    if isinstance(port_or_address, bool) or not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ConfigError(
            f"{port_or_address!r} must be a port in [1, 65535], or an address such as "
            f"'tcp://{LOOPBACK}:5555'"
        )
    return f"tcp://{LOOPBACK}:{text}"


# Events of a socket's monitor. DISCONNECTED ends an established connection, REFUSED an attempt.
CONNECTED, DISCONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
REFUSED = zmq.EVENT_CLOSED


class DealerSocket:
    """One connection to a coordinator. It never reconnects, so each answer belongs to this
    connection. Make another DealerSocket for the next connection."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        waker: SelfPipe,
        *,
        max_frame_bytes: int,
        curve: CurveKeys | None,
    ) -> None:
        """Begin to connect. `waker` ends a `wait`. Raises ConfigError if `address` is not an
        address."""
        self.socket = context.socket(zmq.DEALER)
        self._monitor = context.socket(zmq.PAIR)
        self._waker, self._poller, self._is_listening = waker, zmq.Poller(), False
        try:
            for option, value in _options(address, max_frame_bytes, curve):
                self.socket.setsockopt(option, value)
            watch = f"inproc://dealer-{id(self)}"
            self.socket.monitor(watch, CONNECTED | DISCONNECTED | REFUSED | HANDSHAKE_FAULTS)
            self._monitor.connect(watch)
            self.socket.connect(address)
        except zmq.ZMQError as fault:
            self.close()
            raise ConfigError(f"{address!r} is not an address to connect to: {fault}") from fault
        self._poller.register(waker.descriptor, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def wait(self, timeout_ms: int | None, *, for_messages: bool) -> tuple[bool, bool]:
        """Wait for a connection event, for `waker`, or for a message if `for_messages`.
        `timeout_ms` None waits for ever. Returns whether there are messages, and whether there are
        events."""
        if for_messages != self._is_listening and not self.socket.closed:
            self._poller.register(self.socket, zmq.POLLIN if for_messages else 0)
            self._is_listening = for_messages
        ready: dict[Any, int] = dict(self._poller.poll(timeout_ms))
        if self._waker.descriptor in ready:
            self._waker.drain()
        return self.socket in ready, self._monitor in ready

    def events(self) -> Iterator[int]:
        """Yield the connection events since the last call. Call it only if `wait` has reported
        events, because polling costs as much as receiving a message."""
        while not self._monitor.closed and self._monitor.poll(0):
            yield recv_monitor_message(self._monitor)["event"]

    def send(self, frame: bytes) -> bool:
        """Send a frame without waiting. Returns False if the connection is lost."""
        # The send buffer has no limit: the caller bounds how many frames are under way.
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Sequence[bytes] | None:
        """Return the next frame, or all frames of a Batch. Returns None if nothing has arrived or
        the connection is closed. Raises ProtocolError for a ZeroMQ message of several parts."""
        try:
            parts = [] if self.socket.closed else self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            parts = []
        if len(parts) > 1:
            raise ProtocolError(f"a message is one frame, got {len(parts)}")
        return frames_in(parts[0]) if parts else None

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. A later `wait` waits only for `waker`. A second call does nothing."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close()
            self.socket.close(linger=linger_ms)
            self._poller = zmq.Poller()
            self._poller.register(self._waker.descriptor, zmq.POLLIN)


def _options(address: str, max_frame_bytes: int, curve: CurveKeys | None) -> list[tuple[int, Any]]:
    options: list[tuple[int, Any]] = [
        (zmq.LINGER, 0),
        (zmq.SNDHWM, 0),
        (zmq.MAXMSGSIZE, max_frame_bytes),
        # Never reconnect. The value -1 would also drop messages that were not received yet when
        # the connection is lost.
        (zmq.RECONNECT_IVL, 2**30),  # ms
        (zmq.IPV6, int("[" in address)),
        # Ends the connection to a machine that has vanished.
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
    ]
    if curve is not None:
        options += [(zmq.CURVE_SERVERKEY, curve.server_public)]
        options += [(zmq.CURVE_PUBLICKEY, curve.public), (zmq.CURVE_SECRETKEY, curve.secret)]
    return options
