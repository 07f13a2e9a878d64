"""A fleet of small engines in this process that takes pushes over any transport.

Every engine stages and votes; then all commit, or all roll back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from rollout import WeightUpdateError
from rollout.coordinator.protocol.codec import decode, encode
from rollout.coordinator.protocol.messages import UpdateWeights
from rollout.weights.source import WeightsSource
from rollout.weights.staged import StagedWeights
from rollout.weights.transports.base import WeightTransport
from rollout.weights.transports.collective import CollectiveTransport, CudaIpcTransport
from rollout.weights.transports.delta import DeltaTransport
from rollout.weights.transports.directory import DirectoryTransport
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from tests.tiny_models import InspectedEngine, tiny_engine, tiny_model

MakeTransport = Callable[[Path], WeightTransport]
TRANSPORTS: dict[str, MakeTransport] = {
    "shared": lambda path: SharedTransport(),
    "directory": lambda path: DirectoryTransport(path / "weights"),
    "collective": lambda path: CollectiveTransport(bucket_bytes=4096),
    "cuda_ipc": lambda path: CudaIpcTransport(place="host", bucket_bytes=4096),
    "delta+directory": lambda path: DeltaTransport(DirectoryTransport(path), whole_every=3),
    "delta+collective": lambda path: DeltaTransport(
        CollectiveTransport(bucket_bytes=4096), whole_every=3
    ),
}


def over_the_wire(source: WeightsSource) -> WeightsSource:
    """Return `source` encoded and decoded, as an engine receives it."""
    message = decode(encode(UpdateWeights(command_id=1, source=source)))
    assert isinstance(message, UpdateWeights)
    return message.source


@dataclass
class Member:
    """An engine with its fetcher. `hinder` is called before it fetches, and may raise."""

    engine: InspectedEngine = field(default_factory=lambda: tiny_engine(tiny_model(seed=0)))
    fetcher: WeightFetcher = field(default_factory=WeightFetcher)
    hinder: Callable[[], object] = lambda: None

    def stage(self, source: WeightsSource) -> StagedWeights:
        self.hinder()
        tensors: Any = self.fetcher(source)
        announced = source.tensors_checksum if source.builds_on is None else ""
        return self.engine.stage_weights(tensors, source_checksum=announced)


class WeightFleet:
    """A context manager for the members and the transport of their weights."""

    def __init__(self, transport: WeightTransport, num_members: int = 2) -> None:
        self.transport = transport
        self.members = [Member() for _ in range(num_members)]

    def __enter__(self) -> WeightFleet:
        return self

    def __exit__(self, *exception: object) -> None:
        self.transport.close()

    def push(self, named_tensors: Any) -> WeightsSource:
        """Returns the source. Raises the first fault, after all have rolled back."""
        source = self.transport.publish(named_tensors)
        received = over_the_wire(structs.replace(source, num_members=len(self.members)))
        with ThreadPoolExecutor(1 + len(self.members)) as threads:
            sending = threads.submit(self.transport.send, source)
            staging = [threads.submit(member.stage, received) for member in self.members]
            ended, _ = wait(staging, return_when=FIRST_EXCEPTION)
            faults = [fault for future in ended if (fault := future.exception())]
            if faults:
                self.transport.roll_back()
            sending.exception()
        for fault in faults:
            assert isinstance(fault, WeightUpdateError), fault
            raise fault
        for member, staged in zip(self.members, staging, strict=True):
            member.engine.commit_weights(staged.result(), in_flight=True)
        self.transport.commit()
        return source

    def checksums(self) -> Sequence[str]:
        return [member.engine.weights_checksum() for member in self.members]
