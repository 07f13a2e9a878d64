"""DealerSocket: one connection of a client or an engine to the coordinator; addresses and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout.addresses import LOOPBACK
from rollout.coordinator.net.link_queues import SelfPipe
from rollout.coordinator.net.security import HANDSHAKE_FAULTS, CurveKeys
from rollout.coordinator.protocol.codec import frames_in
from rollout.errors import ConfigError, ProtocolError


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


# Events of a socket's monitor. An established connection is disconnected, a refused one closed.
CONNECTED, DISCONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
REFUSED = zmq.EVENT_CLOSED


class DealerSocket:
    """One connection to a coordinator. It never reconnects, so that each answer belongs to a
    message of the same connection; the next connection is another DealerSocket.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        waker: SelfPipe,
        *,
        max_frame_bytes: int,
        curve: CurveKeys | None,
    ) -> None:
        """Begin to connect. Raises ConfigError if `address` is not an address."""
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
            raise ConfigError(f"{address!r} cannot be dialled: {fault}") from fault
        self._poller.register(waker, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def wait(self, timeout_ms: int | None, *, for_messages: bool) -> tuple[bool, bool]:
        """Wait for messages, if they are wanted, for an event, or for the waker. Returns whether
        there are messages, and whether there are events.
        """
        if for_messages != self._is_listening and not self.socket.closed:
            self._poller.register(self.socket, zmq.POLLIN if for_messages else 0)
            self._is_listening = for_messages
        ready: dict[Any, int] = dict(self._poller.poll(timeout_ms))
        if self._waker.fileno() in ready:  # a poller names other objects by their descriptors
            self._waker.drain()
        return self.socket in ready, self._monitor in ready

    def events(self) -> Iterator[int]:
        """Yield the events of the connection since the last call. Asking costs as much as receiving
        a message; `wait` says whether there are any."""
        while not self._monitor.closed and self._monitor.poll(0):
            yield recv_monitor_message(self._monitor)["event"]

    def send(self, frame: bytes) -> bool:
        """Send a frame without waiting. Returns False only if the connection is lost and no event
        has said so yet. The caller bounds how many frames are under way.
        """
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Sequence[bytes] | None:
        """Return the next frame, or all frames of a Batch; None if nothing has arrived or the
        connection is closed. Raises ProtocolError for a message of several parts.
        """
        try:
            parts = [] if self.socket.closed else self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            parts = []
        if len(parts) > 1:
            raise ProtocolError(f"a message is one frame, got {len(parts)}")
        return frames_in(parts[0]) if parts else None

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; `wait` then only waits for the waker. A second call does nothing."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close()
            self.socket.close(linger=linger_ms)
            self._poller = zmq.Poller()
            self._poller.register(self._waker, zmq.POLLIN)


def _options(address: str, max_frame_bytes: int, curve: CurveKeys | None) -> list[tuple[int, Any]]:
    options: list[tuple[int, Any]] = [
        (zmq.LINGER, 0),
        (zmq.SNDHWM, 0),
        (zmq.MAXMSGSIZE, max_frame_bytes),
        # Never: it has one connection. The value -1 would say so, too, but then messages that
        # were not received yet are dropped when the connection is lost.
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
