"""CollectiveReceiver: an engine's side of collective pushes."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import msgspec
import torch
from torch import Tensor

from rollout.coordinator.protocol.weights_source import WeightsSource
from rollout.coordinator.weights.buckets import BucketHeader, BucketReader, PushEnd
from rollout.coordinator.weights.meeting import (
    Arrival,
    Group,
    GroupPlan,
    address_towards,
    connect_store,
    join,
    put,
    read,
    wait_for,
)
from rollout.errors import WeightUpdateError

STALL_S = 20.0


class CollectiveReceiver:
    """Takes part in pushes, one at a time; its group and its buffer stay from one to the next."""

    def __init__(self, stall_timeout_s: float = STALL_S) -> None:
        """stall_timeout_s: how long one bucket may take once it is announced."""
        self._stall_s = stall_timeout_s
        self._id = uuid.uuid4().hex
        self._turn = threading.Lock()
        self._store: Any = None
        self._place = ("", 0)  # of the store
        self._group: Group | None = None
        self._buffer_N: Tensor | None = None

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
                self._group = self._store = None
                raise WeightUpdateError(
                    f"the broadcasts from {source.address.partition(' ')[0]} ended: {error}; is "
                    "the trainer alive?"
                ) from error

    def _take_part(self, source: WeightsSource) -> dict[str, Tensor]:
        place, _, push_id = source.address.partition(" ")
        host, _, port = place.rpartition(":")
        if self._store is None or self._place != (host, int(port)):
            self._store = connect_store(host, int(port), self._stall_s)
            self._place, self._group = (host, int(port)), None
        store = self._store
        name = "" if self._group is None else self._group.name
        slot = store.add(f"{push_id}/joined", 1) - 1
        put(store, f"{push_id}/member/{slot}", Arrival(self._id, name))
        store.set(f"{push_id}/members", str(source.num_members))
        plan = read(wait_for(store, f"{push_id}/plan", _go_on), GroupPlan)
        if plan.fault:
            raise WeightUpdateError(f"the sender ended the push: {plan.fault}")
        group = self._member_of(plan)
        reader, number = BucketReader(group.device), 0
        while True:
            encoded = wait_for(store, f"{push_id}/{number}", _go_on)
            header: BucketHeader | PushEnd = read(encoded, BucketHeader | PushEnd)  # type: ignore[arg-type]
            if isinstance(header, PushEnd):
                return reader.finish(header)
            reader.read(encoded, header, self._bucket(group, header.num_bytes, plan.bucket_bytes))
            number += 1

    def _member_of(self, plan: GroupPlan) -> Group:
        if self._group is None or self._group.name != plan.group:
            self._group = None
            if self._id not in plan.engines:
                raise WeightUpdateError("the push began without this engine; push again")
            rank, size = 1 + plan.engines.index(self._id), 1 + len(plan.engines)
            own_host = address_towards(*self._place)
            self._group = join(
                *(self._store, plan.group, plan.backend, rank, size), own_host, self._stall_s
            )
        return self._group

    def _bucket(self, group: Group, num_bytes: int, bucket_bytes: int) -> Tensor:
        """The next bucket, uint8 [num_bytes], valid until the one after it."""
        if num_bytes > bucket_bytes:
            raise ValueError(f"a bucket of {num_bytes} bytes was announced, above {bucket_bytes}")
        buffer_N = self._buffer_N
        if buffer_N is None or len(buffer_N) != bucket_bytes or buffer_N.device != group.device:
            buffer_N = torch.empty(bucket_bytes, dtype=torch.uint8, device=group.device)
            self._buffer_N = buffer_N
        group.broadcast(buffer_N[:num_bytes], self._stall_s)
        return buffer_N[:num_bytes]


def _go_on() -> None:
    """The sender ends every push, and its end closes the store."""
