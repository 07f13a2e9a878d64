"""A coordinator on one host, and strangers on another one."""

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
    """Says its address, and when it is asked what it refused, logged and heard."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rollout.coordinator.net.key_gate").addHandler(handler)
    coordinator = DataParallelInferenceCoordinator(None, 1, host=host, curve=coordinator_keys(keys))
    threading.Thread(target=coordinator.start, daemon=True).start()
    pipe.send(coordinator.address)
    while pipe.recv() == "count":
        pipe.send((asdict(coordinator.refusals), len(lines), coordinator.counters.num_frames))


def strangers(pipe: Connection, address: str, keys: Path) -> None:
    """Peers that must not come in, three of each kind, and one that may."""
    known = peer_keys(keys, CLIENT)
    _, unknown = CurveServerKeys.made().with_client()
    unlisted = replace(unknown, server_public=known.server_public)
    of_another = replace(known, server_public=unknown.server_public)
    for own in (None, of_another, unlisted) * 3:
        with peer(address, own) as stranger:
            assert fault_of(stranger) is not None
    recording = Recorder(address)
    with peer(recording.address, known):
        pipe.send("a frame is sent")
        assert pipe.recv() == "it is heard"
        recording.repeat_last_frame()
        pipe.send("a frame is repeated")
        assert pipe.recv() == "it is counted"
    recording.close()
    pipe.send("done")
