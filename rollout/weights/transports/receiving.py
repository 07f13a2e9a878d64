"""CollectiveReceiver: an engine's side of collective pushes."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import msgspec
from torch import Tensor

from rollout.addresses import host_towards, tcp_address
from rollout.errors import WeightUpdateError
from rollout.parallel.stores import connect_store
from rollout.weights.source import WeightsSource
from rollout.weights.transports.buckets import BucketHeader, BucketReader, PushEnd
from rollout.weights.transports.group import (
    OVER,
    Arrival,
    GroupPlan,
    put,
    read,
    wait_for,
)
from rollout.weights.transports.paths import (
    SHARED_PLACES,
    Broadcasts,
    BucketPath,
    SharedBucket,
)

_CONNECT_S = 20.0


class CollectiveReceiver:
    """Takes part in pushes, one at a time; its group and its buffer stay from one to the next."""

    def __init__(self, connect_timeout_s: float = _CONNECT_S) -> None:
        """connect_timeout_s: how long the sender may take to answer."""
        self._connect_s = connect_timeout_s
        self._id = uuid.uuid4().hex
        self._turn = threading.Lock()
        self._store: Any = None
        self._place = ("", 0)  # of the store
        self._path: BucketPath | None = None
        self._group = ""  # its name

    def fetch(self, source: WeightsSource) -> dict[str, Tensor]:
        """The tensors of a push that is being sent, in memory of their own.

        Raises WeightUpdateError if it does not come whole: the reason of the sender, or what has
        happened to it; and if the push is over already.
        """
        if not source.num_members:
            raise WeightUpdateError(
                "weights that were broadcast are not kept; the next push brings them to this engine"
            )
        with self._turn:
            try:
                return self._take_part(source)
            except (RuntimeError, OSError, ValueError, msgspec.MsgspecError) as error:
                self._store = self._path = None
                self._group = ""
                raise WeightUpdateError(
                    f"the broadcasts from {source.address.partition(' ')[0]} ended: {error}; is "
                    "the trainer alive?"
                ) from error

    def _take_part(self, source: WeightsSource) -> dict[str, Tensor]:
        place, _, push_id = source.address.partition(" ")
        host, _, port = place.rpartition(":")
        if self._store is None or self._place != (host, int(port)):
            self._store = connect_store(host, int(port), self._connect_s)
            self._place, self._path, self._group = (host, int(port)), None, ""
        store = self._store
        slot = store.add(f"{push_id}/joined", 1) - 1
        put(store, f"{push_id}/member/{slot}", Arrival(self._id, self._group))
        store.set(f"{push_id}/members", str(source.num_members))
        plan = read(self._wait_for(push_id, "plan"), GroupPlan)
        if plan.fault:
            raise WeightUpdateError(f"the sender ended the push: {plan.fault}")
        path = self._joined(plan)
        reader, number = BucketReader(path.device), 0
        while True:
            key = f"{push_id}/{number}"
            encoded = self._wait_for(push_id, str(number))
            header: BucketHeader | PushEnd = read(encoded, BucketHeader | PushEnd)  # type: ignore[arg-type]
            if isinstance(header, PushEnd):
                return reader.finish(header)
            if header.num_bytes > plan.bucket_bytes:
                raise ValueError(f"bucket {number} has more than {plan.bucket_bytes} bytes")
            reader.read(encoded, header, path.receive(header.num_bytes, plan.stall_s))
            path.taken(key)
            number += 1

    def _wait_for(self, push_id: str, key: str) -> bytes:
        """What the sender puts there. It ends every push, and its own end closes the store; but
        this engine may have been out of reach until the push was over, and forgotten."""
        store, number = self._store, int(push_id.partition("-")[0])

        def check() -> None:
            if read(store.get(OVER), int) >= number:
                raise WeightUpdateError("the push is over; the next one brings the weights")

        return wait_for(store, f"{push_id}/{key}", check)

    def _joined(self, plan: GroupPlan) -> BucketPath:
        """This engine's end of the path to the group of a push."""
        if self._path is not None and self._group == plan.group:
            return self._path
        self._path, self._group = None, ""
        if self._id not in plan.engines:
            raise WeightUpdateError("the push began without this engine; push again")
        store, backend = self._store, plan.backend
        if backend in SHARED_PLACES:
            bucket_bytes = plan.bucket_bytes
            self._path = SharedBucket.opened(store, backend, plan.address, bucket_bytes)
        else:
            rank, size = 1 + plan.engines.index(self._id), 1 + len(plan.engines)
            own_host = host_towards(tcp_address(*self._place))
            self._path = Broadcasts(store, plan.group, backend, rank, size, own_host)
        self._group = plan.group
        return self._path
