"""One turn of the coordinator's loop, without its thread and its peers' sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.protocol.codec import encode
from rollout.coordinator.protocol.headers import PROTOCOL_VERSION
from rollout.coordinator.protocol.messages import Connect, Message
from tests.coordinator.fake_engine import FakeEngine

ENGINES = [FakeEngine(b"engine%d" % number, bytes([number]) * 16) for number in range(3)]


class ScriptedSocket:
    """In a router's place: `incoming` is received, at one second each. `sent`: to whom, and whether
    it was to be kept for a peer that is slow."""

    address = "tcp://nowhere"

    def __init__(self, incoming: Sequence[tuple[bytes, Message]]) -> None:
        self.incoming = incoming
        self.now = 100.0
        self.seconds_per_frame = 0.25
        self.sent: list[tuple[bytes, bool]] = []
        self.reaches_anybody = True

    def receive(self, max_frames: int) -> Iterator[tuple[bytes, bytes]]:
        for identity, message in self.incoming:
            self.now += self.seconds_per_frame
            yield identity, encode(message)

    def send(
        self, identity: bytes, frame: bytes, num: int, *, keeps: Callable[[bytes], bool]
    ) -> bool:
        self.sent.append((identity, keeps(identity)))
        return self.reaches_anybody

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is nothing to close."""


def turned(
    monkeypatch: pytest.MonkeyPatch, socket: ScriptedSocket
) -> DataParallelInferenceCoordinator:
    """A coordinator that has taken what there is at `socket`, by the time there."""
    module = "rollout.coordinator.coordinator"
    monkeypatch.setattr(f"{module}.Router", lambda *_, **__: socket)
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: socket.now))
    coordinator = DataParallelInferenceCoordinator(None, 1, None)
    coordinator._turn()
    return coordinator


def test_a_peer_is_heard_when_its_frame_is_received_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its lease could end at the coordinator while it still runs at the engine, which counts
    it from when it sent what was received."""
    socket = ScriptedSocket([(engine.identity, engine.registration()) for engine in ENGINES])
    coordinator: Any = turned(monkeypatch, socket)
    engines = coordinator._core._registry.engines
    assert [engine.last_seen for engine in engines.values()] == [100.25, 100.5, 100.75]
    coordinator.stop()


def test_a_stop_amid_a_turn_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = ScriptedSocket([(engine.identity, engine.registration()) for engine in ENGINES])
    socket.seconds_per_frame = 100.0  # far above any lease
    coordinator: Any = turned(monkeypatch, socket)
    assert len(coordinator._core._registry.engines) == len(ENGINES)
    coordinator.stop()


def test_what_is_sent_to_an_engine_is_kept_if_it_is_slow_and_to_a_client_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client is told again; an engine would be given up."""
    greeting = Connect(protocol_version=PROTOCOL_VERSION, client_id=bytes(16))
    socket = ScriptedSocket([(b"client", greeting), (b"engine0", ENGINES[0].registration())])
    coordinator = turned(monkeypatch, socket)
    assert socket.sent == [(b"client", False), (b"engine0", True)]
    coordinator.stop()


def test_peers_that_have_gone_before_the_end_are_no_alarm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    socket = ScriptedSocket([(engine.identity, engine.registration()) for engine in ENGINES])
    coordinator = turned(monkeypatch, socket)
    socket.sent.clear()
    socket.reaches_anybody = False
    coordinator.stop()
    assert [identity for identity, _ in socket.sent] == [engine.identity for engine in ENGINES]
    assert not caplog.records
