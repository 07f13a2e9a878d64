"""KeyGate counts refused connections by reason, and logs each reason once."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollout.coordinator.net import key_gate
from rollout.coordinator.net.key_gate import Refusals
from rollout.coordinator.net.security import CurveKeys
from rollout.coordinator.net.sockets import RouterSocket
from tests.coordinator.test_security import WAIT_S, fault_of, peer, received_by, router, server_keys
from tests.coordinator.zmtp_recorder import Recorder

NUM_TRIES = 3


@contextmanager
def recorder(made: RouterSocket) -> Iterator[Recorder]:
    recording = Recorder(made.address)
    try:
        yield recording
    finally:
        recording.close()


def wait_for(made: RouterSocket, **counts: int) -> None:
    """Until the gate has counted so many refusals, and no others."""
    wanted, ended = Refusals(**counts), threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if made.refusals == wanted:
            return
        ended.wait(0.01)
    raise AssertionError(f"{made.refusals} is not {wanted}")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "refused a peer" in r.getMessage()]


@pytest.mark.parametrize(
    ("whose", "counter", "line"),
    [
        ("unknown", "num_unknown_keys", "is unknown"),
        ("nobody", "num_without_keys", "it has no key"),
        ("another coordinator", "num_wrong_server_keys", "public key of another coordinator"),
    ],
)
def test_a_refused_peer_is_counted_each_time_and_logged_once(
    whose: str, counter: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys, known = server_keys().with_client()
    _, unknown = keys.with_client()
    of_another = dataclasses.replace(known, server_public=server_keys().public)
    own: dict[str, CurveKeys | None] = {
        "unknown": unknown,
        "nobody": None,
        "another coordinator": of_another,
    }
    with router("127.0.0.1", curve=keys) as made:
        for _ in range(NUM_TRIES):
            with peer(made.address, own[whose]) as unknown:
                assert fault_of(unknown) is not None
        wait_for(made, **{counter: NUM_TRIES})
        (logged,) = lines(caplog)
        assert line in logged
        with peer(made.address, known):
            assert received_by(made) == [b"hello"], "and nothing of the unknown peers"


def test_a_replayed_frame_is_not_received_and_ends_its_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_gate, "PING_INTERVAL_MS", 100)
    monkeypatch.setattr(key_gate, "PING_TIMEOUT_MS", 1000)
    keys, known = server_keys().with_client()
    with router("127.0.0.1", curve=keys) as made:
        for count in (1, 2):
            with recorder(made) as recording, peer(recording.address, known):
                assert received_by(made) == [b"hello"]
                recording.repeat_last_frame()
                assert recording.has_lost_the_router.wait(WAIT_S)
                wait_for(made, num_replayed_frames=count)
        assert not made.socket.poll(0), "nothing was received twice"
        (logged,) = lines(caplog)
        assert "a second time" in logged


def test_a_recorded_connection_cannot_be_played_again(caplog: pytest.LogCaptureFixture) -> None:
    keys, known = server_keys().with_client()
    with router("127.0.0.1", curve=keys) as made:
        with recorder(made) as recording, peer(recording.address, known):
            assert received_by(made) == [b"hello"]
            recorded = bytes(recording.sent)
        for _ in range(NUM_TRIES):
            with socket.create_connection(("127.0.0.1", int(made.address.rpartition(":")[2]))) as s:
                s.sendall(recorded)
                s.settimeout(WAIT_S)
                with contextlib.suppress(ConnectionResetError):
                    while s.recv(2**16):
                        pass
        wait_for(made, num_malformed=NUM_TRIES)
        assert not made.socket.poll(0)
        assert len(lines(caplog)) == 1
