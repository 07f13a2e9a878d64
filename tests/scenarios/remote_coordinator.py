"""Processes of test_two_hosts: a coordinator on one host, and unauthenticated peers on another."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.net.key_folder import CLIENT, coordinator_keys, peer_keys
from rollout.coordinator.net.security import CurveServerKeys
from tests.coordinator.test_security import fault_of, peer
from tests.coordinator.zmtp_recorder import Recorder


def a_coordinator(pipe: Connection, host: str, keys: Path) -> None:
    """Send its address; on each "count" send refusals, number of log lines and of frames."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rollout.coordinator.net.key_gate").addHandler(handler)
    coordinator = DataParallelInferenceCoordinator(None, 1, host=host, curve=coordinator_keys(keys))
    threading.Thread(target=coordinator.start, daemon=True).start()
    pipe.send(coordinator.address)
    while pipe.recv() == "count":
        pipe.send((asdict(coordinator.refusals), len(lines), coordinator.counters.num_frames))


def unknown_peers(pipe: Connection, address: str, keys: Path) -> None:
    """Connect peers that must be refused, three of each kind, and one that must not."""
    known = peer_keys(keys, CLIENT)
    _, unknown = CurveServerKeys.made().with_client()
    unlisted = replace(unknown, server_public=known.server_public)
    of_another = replace(known, server_public=unknown.server_public)
    for own in (None, of_another, unlisted) * 3:
        with peer(address, own) as refused:
            assert fault_of(refused) is not None
    recording = Recorder(address)
    with peer(recording.address, known):
        pipe.send("a frame is sent")
        assert pipe.recv() == "it is received"
        recording.repeat_last_frame()
        pipe.send("a frame is repeated")
        assert pipe.recv() == "it is counted"
    recording.close()
    pipe.send("done")
