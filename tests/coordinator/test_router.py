"""RouterSocket towards peers that read slowly, or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq

from rollout.coordinator.net import sockets
from rollout.coordinator.net.sockets import RouterSocket
from rollout.coordinator.protocol.codec import batched

WAIT_S = 30.0
NUM_FRAMES = 400
PADDING = bytes(2**16)  # all frames together are more than the machine's sockets take


@contextmanager
def router_and_peer() -> Iterator[tuple[RouterSocket, bytes, zmq.Socket[bytes]]]:
    """A router, and a peer by its identity and its socket."""
    router = RouterSocket("127.0.0.1", None, max_frame_bytes=2**20)
    peer = zmq.Context.instance().socket(zmq.DEALER)
    try:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.setsockopt(zmq.RCVBUF, 2**16)
        peer.connect(router.address)
        peer.send(b"here")
        assert router.socket.poll(WAIT_S * 1000)
        ((identity, _),) = router.receive(9)
        yield router, identity, peer
    finally:
        peer.close()
        router.socket.setsockopt(zmq.LINGER, 0)
        router.close()


def everybody(_: bytes) -> bool:
    return True


def nobody(_: bytes) -> bool:
    return False


def frame_of(number: int) -> bytes:
    return number.to_bytes(4, "big") + PADDING


@pytest.fixture(autouse=True)
def _few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_WAITING_FRAMES", 4)


def test_all_that_a_slow_engine_is_sent_arrives_in_order() -> None:
    with router_and_peer() as (router, identity, peer):
        for number in range(NUM_FRAMES):
            assert router.send(identity, frame_of(number), keeps=everybody)
        arrived: list[int] = []
        end = time.monotonic() + WAIT_S
        while len(arrived) < NUM_FRAMES:
            assert time.monotonic() < end
            router.flush()
            # What is sent meanwhile does not overtake what waits.
            if len(arrived) == NUM_FRAMES // 2:
                assert router.send(identity, frame_of(NUM_FRAMES), keeps=everybody)
            if peer.poll(1):
                arrived.append(int.from_bytes(peer.recv()[:4], "big"))
        assert arrived == list(range(NUM_FRAMES))
        while not peer.poll(1):
            assert time.monotonic() < end
            router.flush()
        assert peer.recv() == frame_of(NUM_FRAMES)


def test_frames_for_a_slow_client_are_not_kept() -> None:
    with router_and_peer() as (router, identity, _):
        assert not all(router.send(identity, frame_of(i), keeps=nobody) for i in range(NUM_FRAMES))


def test_an_engine_that_reads_nothing_cannot_be_reached_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "MAX_KEPT_MESSAGES", 8)
    with router_and_peer() as (router, identity, _):
        sent = [router.send(identity, frame_of(i), keeps=everybody) for i in range(NUM_FRAMES)]
        assert sent == sorted(sent, reverse=True)
        assert not sent[-1]


def test_frames_kept_for_an_engine_count_the_messages_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def num_kept(num_messages: int) -> int:
        """How many frames are taken after the one for which the socket had no room."""
        with router_and_peer() as (router, identity, _):
            monkeypatch.setattr(sockets, "MAX_KEPT_MESSAGES", 0)
            assert not all(
                router.send(identity, frame_of(i), keeps=everybody) for i in range(NUM_FRAMES)
            )
            monkeypatch.setattr(sockets, "MAX_KEPT_MESSAGES", 64)
            frames = map(frame_of, range(NUM_FRAMES))
            return sum(router.send(identity, f, num_messages, keeps=everybody) for f in frames)

    assert num_kept(1) == 64
    assert num_kept(32) == 2


def test_frames_kept_for_a_disconnected_engine_are_dropped() -> None:
    with router_and_peer() as (router, identity, peer):
        for number in range(NUM_FRAMES):
            router.send(identity, frame_of(number), keeps=everybody)
        peer.close()
        end = time.monotonic() + WAIT_S
        while router.send(identity, b"", keeps=everybody):
            assert time.monotonic() < end
            router.socket.poll(5)
            router.flush()


def test_receive_yields_the_frames_of_a_batch_and_an_empty_frame_for_malformed_ones() -> None:
    with router_and_peer() as (router, identity, peer):
        ((together, num),) = batched([b"first", b"\xc1", b"last"])
        assert num == 3
        for frame in (together, b"alone", together[:-1]):
            peer.send(frame)
        peer.send_multipart([b"two", b"parts"])
        got: list[tuple[bytes, bytes]] = []
        while len(got) < 6:
            assert router.socket.poll(WAIT_S * 1000)
            got += router.receive(1)
        frames = [b"first", b"\xc1", b"last", b"alone", b"", b""]
        assert got == [(identity, frame) for frame in frames]
