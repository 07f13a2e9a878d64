"""The "relay" and "bare" peers of `benchmarks.coordinator`: a ROUTER, and plain DEALERs.

Used by `benchmarks.coordinator_fleet`, which runs each function `serve_*` in a process of its own.
The peers open sockets on loopback and send frames encoded in advance. A coordinator's engines and
clients follow its protocol. The relay's engines and clients decode no frame.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import zmq

from benchmarks.coordinator_load import (
    PARAMS,
    Grants,
    Timing,
    next_load,
    prompt,
    registration,
)
from rollout.coordinator.client.pending_requests import ACKNOWLEDGE_WITHIN_S, MAX_UNACKNOWLEDGED
from rollout.coordinator.net.sockets import RouterSocket
from rollout.coordinator.protocol.codec import decode, encode, frames_in
from rollout.coordinator.protocol.messages import (
    PROTOCOL_VERSION,
    Connect,
    ConnectAck,
    EngineReply,
    Headers,
    RegisterAck,
    Sample,
    SubmitRequest,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
)
from rollout.wire import DEFAULT_MAX_FRAME_BYTES

_BATCH = 256
_WAIT_MS = 20_000  # for one message; a longer wait is an error
_HELLO = b""  # first message of an engine to the relay
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
# Ids from here on take nine bytes on the wire.
_FIRST_ID = 2**40


def serve_relay(pipe: Connection, num_engines: int) -> None:
    """Forward requests to `num_engines` engines in turn, and replies to their clients.

    Decodes no frame. Sends its address and then "ready" into the pipe. Returns when the pipe is
    closed.
    """
    router = RouterSocket("127.0.0.1", None, max_frame_bytes=DEFAULT_MAX_FRAME_BYTES)
    socket = router.socket
    pipe.send(router.address)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(pipe.fileno(), zmq.POLLIN)
    receive, send = socket.recv, socket.send
    engines: list[bytes] = []
    turn = 0
    while pipe.fileno() not in dict(poller.poll()):
        for _ in range(_BATCH):
            try:
                identity = receive(_NOBLOCK)
            except zmq.Again:
                break
            first = receive(_NOBLOCK, copy=False)
            if first.more:
                send(first.bytes, _MORE)
                send(receive(_NOBLOCK), _NOBLOCK)
            elif first.bytes == _HELLO:
                engines.append(identity)
                if len(engines) == num_engines:
                    pipe.send("ready")
            else:
                turn = (turn + 1) % num_engines
                send(engines[turn], _MORE)
                send(identity, _MORE)
                send(first.bytes, _NOBLOCK)
    router.close()


def serve_bare_engine(pipe: Connection, address: str, record: bytes, *, is_relay: bool) -> None:
    """Reply to each request at once with `record`, from one DEALER socket.

    `is_relay` says whether `address` is the relay's. Sends "ready" into the pipe. Returns when the
    pipe is closed.
    """
    with zmq.Context() as context, _dealer(context, address) as socket:
        grants = Grants()
        socket.send(_HELLO if is_relay else encode(registration(uuid.uuid4().bytes)))
        if not is_relay:
            ack = decode(_next_frame(socket))
            assert isinstance(ack, RegisterAck)
            grants = Grants(ack.session)
            first = grants.take(0)
            assert first is not None
            socket.send(encode(first))
        pipe.send("ready")
        frame = encode(EngineReply(request_id=_FIRST_ID, record=record))
        head, tail = frame.split(msgpack.packb(_FIRST_ID), 1)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(pipe.fileno(), zmq.POLLIN)
        while pipe.fileno() not in dict(poller.poll()):
            for frames in _waiting(socket):
                if is_relay:
                    socket.send_multipart((frames[0], frame))
                    continue
                for fields in map(msgpack.unpackb, frames_in(frames[0])):
                    if fields[0] == Headers.ASSIGN_REQUEST:
                        for sample in fields[1]:
                            socket.send(head + msgpack.packb(sample[0]) + tail)
                        if (credit := grants.take(len(fields[1]))) is not None:
                            socket.send(encode(credit))


class _BareClient:
    """A client of the relay or the coordinator, with a DEALER socket."""

    def __init__(self, context: zmq.Context[Any], address: str, *, is_relay: bool) -> None:
        self.socket = _dealer(context, address)
        self._is_relay = is_relay
        self._next_id = _FIRST_ID
        self._frames: list[bytes] = []
        self._sent_at: list[float] = []
        self._arrived: list[bytes] = []  # packed ids of replies that are not acknowledged
        self._acknowledge_at = math.inf
        if not is_relay:
            greeting = Connect(protocol_version=PROTOCOL_VERSION, client_id=uuid.uuid4().bytes)
            self.socket.send(encode(greeting))
            assert isinstance(decode(_next_frame(self.socket)), ConnectAck)

    @property
    def num_left(self) -> int:
        """Number of prepared requests that are not sent yet."""
        return len(self._frames)

    def prepare(self, num_requests: int) -> None:
        """Encode `num_requests` requests, which `submit` sends."""
        params = pack_params(PARAMS)
        ids = range(self._next_id, self._next_id + num_requests)
        self._next_id = ids.stop
        # Reversed, because `submit` pops the last one.
        self._frames = [
            encode(
                SubmitRequest(
                    samples=(Sample(request_id=i, sampling_params=params, seed=i),),
                    prompt_tokens=prompt(),
                )
            )
            for i in reversed(ids)
        ]
        self._sent_at = []

    def submit(self) -> None:
        """Send the next prepared request."""
        self._sent_at.append(time.monotonic())
        self.socket.send(self._frames.pop())

    def take(self) -> list[float]:
        """Receive the replies that have arrived, and return a latency in seconds for each reply.

        Pairs replies with requests in sending order, so the mean latency is exact. Also
        acknowledges replies to a coordinator if enough are unacknowledged or the oldest waits too
        long.
        """
        replies = [frame for frames in _waiting(self.socket) for frame in frames_in(frames[0])]
        now = time.monotonic()
        if not self._is_relay:
            if replies and not self._arrived:
                self._acknowledge_at = now + ACKNOWLEDGE_WITHIN_S
            # [21, id, ...]: one byte each for the array and the header, nine for the id.
            self._arrived += [frame[3:11] for frame in replies]
            if len(self._arrived) >= MAX_UNACKNOWLEDGED or now >= self._acknowledge_at:
                self.acknowledge()
        latencies = [now - sent_at for sent_at in self._sent_at[: len(replies)]]
        del self._sent_at[: len(replies)]
        return latencies

    def acknowledge(self) -> None:
        """Acknowledge all unacknowledged replies."""
        arrived, self._arrived, self._acknowledge_at = self._arrived, [], math.inf
        if arrived:
            attempts = [[int.from_bytes(packed, "big"), 0] for packed in arrived]
            self.socket.send(msgpack.packb([int(Headers.REPLY_ACK), attempts]))


def serve_bare_clients(pipe: Connection, address: str, num_clients: int, *, is_relay: bool) -> None:
    """Run each Load that the pipe delivers, and send a Timing for it.

    Sends "ready" and, before each Load starts, "prepared" into the pipe. Returns when the pipe is
    closed.
    """
    with zmq.Context() as context:
        clients = [_BareClient(context, address, is_relay=is_relay) for _ in range(num_clients)]
        pipe.send("ready")
        while (load := next_load(pipe)) is not None:
            for client in clients:
                client.prepare(load.num_requests)
            pipe.send("prepared")
            pipe.recv()
            pipe.send(_timed_turns(clients) if load.window == 0 else _timed(clients, load.window))
            for client in clients:
                client.acknowledge()
        for client in clients:
            client.socket.close()


def _timed(clients: Sequence[_BareClient], window: int) -> Timing:
    """Send all prepared requests, with at most `window` unfinished requests per client."""
    poller = zmq.Poller()
    latencies: list[float] = []
    num_open = sum(client.num_left for client in clients)
    start = time.monotonic()
    for client in clients:
        poller.register(client.socket, zmq.POLLIN)
        for _ in range(min(window, client.num_left)):
            client.submit()
    client_of = {client.socket: client for client in clients}
    while len(latencies) < num_open:
        ready = poller.poll(_WAIT_MS)
        assert ready, "no reply came"
        for socket, _ in ready:
            client = client_of[socket]
            answered = client.take()
            latencies += answered
            for _ in range(min(len(answered), client.num_left)):
                client.submit()
    return Timing(start=start, end=time.monotonic(), latencies=latencies)


def _timed_turns(clients: Sequence[_BareClient]) -> Timing:
    """Send all prepared requests one at a time. The clients take turns."""
    start, latencies = time.monotonic(), []
    while clients[0].num_left:
        for client in clients:
            client.submit()
            assert client.socket.poll(_WAIT_MS), "no reply came"
            latencies += client.take()
    return Timing(start=start, end=time.monotonic(), latencies=latencies)


# ---- sockets


def _dealer(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    return socket


def _next_frame(socket: zmq.Socket[bytes]) -> bytes:
    assert socket.poll(_WAIT_MS), "no reply came"
    return socket.recv()


def _waiting(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Return at most _BATCH messages that have arrived."""
    messages: list[list[bytes]] = []
    while len(messages) < _BATCH:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages
