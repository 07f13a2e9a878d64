"""One turn of the coordinator's loop, without its thread and with a fake socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from socket import socketpair
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.control.commands import Shutdown
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.core import CoordinatorCore
from rollout.coordinator.net.key_gate import Refusals
from rollout.coordinator.protocol.codec import encode
from rollout.coordinator.protocol.messages import PROTOCOL_VERSION, Connect, Disconnect
from rollout.wire import Message
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.fake_engine import FakeEngine

ENGINES = [FakeEngine(b"engine%d" % number, bytes([number]) * 16) for number in range(3)]


class ScriptedSocket:
    """In a router's place: `incoming` is received in the first turn, at `seconds_per_frame` each.
    Then `after_turn` is called. `sent`: to whom, and whether it was to be kept for a slow peer.
    """

    address = "tcp://nowhere"
    refusals = Refusals()

    def __init__(self, incoming: Sequence[tuple[bytes, Message]]) -> None:
        self.incoming = list(incoming)
        self.now = 100.0
        self.seconds_per_frame = 0.25
        self.sent: list[tuple[bytes, bool]] = []
        self.reaches_anybody = True
        self.after_turn: Callable[[], object] = lambda: None
        self._num_turns = 0
        self.socket, self._waker = socketpair()
        self._waker.send(b"news")  # so that no turn is waited for

    def receive(self, max_frames: int) -> Iterator[tuple[bytes, bytes]]:
        while self.incoming:
            identity, message = self.incoming.pop(0)
            self.now += self.seconds_per_frame
            yield identity, encode(message)

    def send(
        self, identity: bytes, frame: bytes, num: int, *, keeps: Callable[[bytes], bool]
    ) -> bool:
        self.sent.append((identity, keeps(identity)))
        return self.reaches_anybody

    def flush(self) -> None:
        """Called when a turn begins."""
        self._num_turns += 1
        if self._num_turns == 2:
            self.after_turn()

    def close(self) -> None:
        self.socket.close()
        self._waker.close()


def run_one_turn(
    monkeypatch: pytest.MonkeyPatch,
    socket: ScriptedSocket,
    then: Callable[[DataParallelInferenceCoordinator], object] = lambda _: None,
) -> None:
    """A coordinator takes what there is at `socket`, by the time there; it stops after `then`."""
    module = "rollout.coordinator.coordinator"
    monkeypatch.setattr(f"{module}.RouterSocket", lambda *_, **__: socket)
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: socket.now))
    coordinator = DataParallelInferenceCoordinator(None, 1, None)

    def stop() -> None:
        then(coordinator)
        coordinator.stop()

    socket.after_turn = stop
    coordinator.start()


def test_a_peer_counts_as_alive_when_its_frame_is_received_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its lease could end at the coordinator while it still runs at the engine, which counts
    it from when it sent what was received."""
    received_at: list[float] = []

    class Core(CoordinatorCore):
        def handle(self, identity: bytes, frame: Any, now: float) -> Any:
            received_at.append(now)
            return super().handle(identity, frame, now)

    monkeypatch.setattr("rollout.coordinator.coordinator.CoordinatorCore", Core)
    socket = ScriptedSocket([(engine.identity, engine.registration()) for engine in ENGINES])
    run_one_turn(monkeypatch, socket)
    assert received_at == [100.25, 100.5, 100.75]


def test_a_stopped_coordinator_process_does_not_end_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = ScriptedSocket([(engine.identity, engine.registration()) for engine in ENGINES])
    socket.seconds_per_frame = 100.0  # far above any lease
    counted: list[tuple[int, int]] = []

    def count(coordinator: DataParallelInferenceCoordinator) -> None:
        counters = coordinator.counters
        counted.append((counters.num_engines_joined, counters.num_engines_lost))

    run_one_turn(monkeypatch, socket, count)
    assert counted == [(len(ENGINES), 0)]


def test_frames_are_kept_for_slow_engines_and_not_for_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client is sent it again; an engine would be given up."""
    handshake = Connect(protocol_version=PROTOCOL_VERSION, client_id=bytes(16))
    socket = ScriptedSocket([(b"client", handshake), (b"engine0", ENGINES[0].registration())])
    sent: list[tuple[bytes, bool]] = []
    run_one_turn(monkeypatch, socket, lambda _: sent.extend(socket.sent))
    assert sent == [(b"client", False), (b"engine0", True)]


def test_closing_with_disconnected_peers_logs_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    socket = ScriptedSocket([(engine.identity, engine.registration()) for engine in ENGINES])

    def all_leave(_: DataParallelInferenceCoordinator) -> None:
        socket.sent.clear()
        socket.reaches_anybody = False

    run_one_turn(monkeypatch, socket, all_leave)
    assert [identity for identity, _ in socket.sent] == [engine.identity for engine in ENGINES]
    assert not caplog.records


def test_an_engine_that_disconnects_while_a_message_is_sent_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its Disconnect arrives before the connection ends, perhaps after the turn has received."""

    class Leaving(ScriptedSocket):
        def send(self, identity: bytes, *arguments: Any, **options: Any) -> bool:
            if not self.sent:
                self.incoming.append((identity, Disconnect(reason="the engine stops")))
                self.reaches_anybody = False
            return super().send(identity, *arguments, **options)

    socket = Leaving([(ENGINES[0].identity, ENGINES[0].registration())])
    lost: list[tuple[int, int]] = []

    def count(coordinator: DataParallelInferenceCoordinator) -> None:
        counters = coordinator.counters
        lost.append((counters.num_engines_lost, counters.num_undelivered))

    run_one_turn(monkeypatch, socket, count)
    assert lost == [(1, 1)], "who disconnects is counted as well, once"
    assert not caplog.records, "a lost one would be warned of"


def test_a_message_to_several_engines_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Message] = []

    def count(message: Message, max_bytes: int) -> bytes:
        encoded.append(message)
        return encode(message, max_bytes)

    monkeypatch.setattr("rollout.coordinator.coordinator.encode", count)
    client = FakeClient(b"client", b"c" * 16)
    handshake = Connect(client_id=client.client_id)
    ask = Shutdown(command_id=1)  # goes to engines without work, too
    incoming = [(engine.identity, engine.registration()) for engine in ENGINES]
    socket = ScriptedSocket([*incoming, (client.identity, handshake), (client.identity, ask)])
    run_one_turn(monkeypatch, socket)
    shutdowns = [message for message in encoded if type(message) is type(ask)]
    assert len(ENGINES) > len(shutdowns) == 1
