"""CollectiveTransport and CollectiveReceiver: a trainer broadcasts weights to all engines at once.

Buckets of bytes are sent one at a time through one reused buffer. The weights are not kept: an
engine that joins the fleet later gets no requests until the next push. Used by
`rollout.weights.transports.registry`, and by `rollout.weights.transports.delta` to send deltas.
Opens TCP connections and torch.distributed groups.
"""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from rollout.addresses import host_towards, tcp_address
from rollout.backends.shared_buffer import DEVICE, require_place
from rollout.errors import ConfigError, WeightUpdateError
from rollout.parallel.stores import connect_store
from rollout.weights.source import WeightsSource
from rollout.weights.transports.buckets import (
    SHARED_PLACES,
    Broadcasts,
    BucketHeader,
    BucketPath,
    BucketReader,
    BucketWriter,
    PushEnd,
    SharedBucket,
)
from rollout.weights.transports.reading import TensorReader, terms_of
from rollout.weights.transports.sent import (
    OVER,
    RolledBackError,
    SentTransport,
    put,
    read,
    wait_for,
)
from rollout.weights.update import NamedTensors

BUCKET_BYTES = 64 << 20
STALL_S = 20.0
_CONNECT_S = 20.0
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Push:
    """A push of the sender. `number` is its index, from 1. `num_announced` is the number of buckets
    announced so far."""

    number: int
    id: str
    named_tensors: NamedTensors
    source: WeightsSource
    num_announced: int = 0
    is_over: bool = False


# ---- the rendezvous of a push, in the sender's TCPStore
#
# For each push an engine writes an Arrival, with the name of the group that it still has. When as
# many engines have arrived as the coordinator asked to stage, the sender writes the GroupPlan: the
# group, and each engine's rank. If the same engines arrive with the same group, it is reused. The
# id of a push begins with its number, so that a late engine sees that the push is over.


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Message of an engine that takes part in a push. `group` is the group to which the engine
    still belongs; "" if it belongs to none."""

    engine: str
    group: str


class GroupPlan(msgspec.Struct, frozen=True, array_like=True):
    """Message of the sender with the group of a push.

    `engines` are the ids of ranks 1, 2, ...; the sender is rank 0. `backend` is a backend of
    torch.distributed, or "cuda" or "host" for the place of a SharedBucket. `stall_s` is how long
    one bucket can take after its announcement. `fault` says why there is no group; "" if there is
    one. `address` is the address of the SharedBucket, which engines open; "" for a
    torch.distributed group.
    """

    group: str
    engines: tuple[str, ...]
    backend: str
    bucket_bytes: int
    stall_s: float = 0.0
    fault: str = ""
    address: str = ""


# ---- the trainer's side


class CollectiveTransport(SentTransport[_Push]):
    """A WeightTransport whose `send` forms a group with the engines and broadcasts the tensors.

    The transport listens at `host`, and reuses the group for the next push. Groups of
    torch.distributed have no passwords. Any program that reaches `host` can read the weights, so
    the network must be private.
    """

    kind = "collective"

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        backend: str = "gloo",
        bucket_bytes: int = BUCKET_BYTES,
        stall_timeout_s: float = STALL_S,
        reject_non_finite: bool = True,
    ) -> None:
        """`host` is an address of this machine that the engines reach. `backend` is gloo or nccl.
        `stall_timeout_s` is how long one bucket can take. A slower member ends the push. Raises
        ConfigError for an invalid `bucket_bytes`, or if it cannot listen at `host`."""
        if bucket_bytes < 8 or bucket_bytes % 8:
            raise ConfigError(f"bucket_bytes={bucket_bytes} must be a multiple of 8, above 0")
        super().__init__(host, stall_timeout_s)
        self._host, self._backend, self._stall_s = host, backend, stall_timeout_s
        self._bucket_bytes = bucket_bytes
        self._reject_non_finite = reject_non_finite
        self._path: BucketPath | None = None
        self._group = ""  # name of the group
        self._engines: tuple[str, ...] = ()  # ids of ranks 1, 2, ... of the group
        self._old: _Push | None = None  # the push whose keys are still in the store

    def publish(
        self, named_tensors: NamedTensors, *, builds_on: str | None = None
    ) -> WeightsSource:
        """Return a source with the address at which engines join the push. `send` reads the
        tensors. `builds_on` is a field of the WeightsSource, given by a DeltaTransport. Raises
        WeightUpdateError for an adapter that cannot be sent."""
        self.roll_back()
        self._num_pushes += 1
        push_id = f"{self._num_pushes}-{uuid.uuid4().hex}"
        source = WeightsSource(
            kind=self.kind,
            address=f"{self._host}:{self._port} {push_id}",
            manifest=b"",
            checksum="",
            lora=terms_of(named_tensors),
            is_kept=False,
            builds_on=builds_on,
        )
        return self._start(_Push(self._num_pushes, push_id, named_tensors, source))

    def send(self, source: WeightsSource) -> None:
        """Form the group with the engines that arrive, and send the tensors. Returns early if the
        push is rolled back. Raises WeightUpdateError if a tensor cannot be read, or if an engine
        disconnects or takes too long."""
        push = self._take(source)
        with self._sending:
            if self._store is None:
                return  # `close` has ended the push
            self._remove_keys(self._old)
            self._old = push
            try:
                self._form_group(push)
                end = self._send_buckets(push)
            except RolledBackError as error:
                end = PushEnd(push.num_announced, "", str(error))
            except BaseException as error:
                is_ours = isinstance(error, WeightUpdateError)
                fault = str(error) if is_ours else f"{type(error).__name__}: {error}"
                self._end(push, PushEnd(push.num_announced, "", fault))
                raise
            self._end(push, end)

    # ---- one push, in the thread of `send`

    def _form_group(self, push: _Push) -> None:
        """Wait for the engines and form their group. Reuse the group of the push before if the
        members are the same. Raises WeightUpdateError."""
        store, key = self._store, push.id
        try:
            count = int(wait_for(store, f"{key}/members", lambda: self._check(push)))
            encoded = [
                wait_for(store, f"{key}/member/{slot}", lambda: self._check(push))
                for slot in range(count)
            ]
            arrivals = sorted((read(e, Arrival) for e in encoded), key=lambda a: a.engine)
            engines = tuple(arrival.engine for arrival in arrivals)
            is_same = engines == self._engines and all(
                arrival.group == self._group for arrival in arrivals
            )
            if self._path is None or not is_same:
                self._leave()
                self._join(push, uuid.uuid4().hex, engines)
            else:
                put(store, f"{key}/plan", self._plan(self._group, engines, self._path.address))
        except (RuntimeError, OSError, MemoryError, msgspec.MsgspecError) as error:
            self._leave()
            raise WeightUpdateError(f"cannot form a group with the engines: {error}") from error

    def _join(self, push: _Push, name: str, engines: tuple[str, ...]) -> None:
        """Publish the plan of a new group, and join the group."""
        store, key, size = self._store, f"{push.id}/plan", len(engines)
        if self._backend in SHARED_PLACES:
            self._path = SharedBucket(store, self._backend, self._bucket_bytes, size)
            put(store, key, self._plan(name, engines, self._path.address))
        else:
            put(store, key, self._plan(name, engines))
            self._path = Broadcasts(store, name, self._backend, 0, 1 + size, self._host)
        self._group, self._engines = name, engines
        _logger.info("weights are sent to a group of %d engines", size)

    def _plan(self, name: str, engines: tuple[str, ...], address: str = "") -> GroupPlan:
        of_buckets = self._backend, self._bucket_bytes, self._stall_s
        return GroupPlan(name, engines, *of_buckets, address=address)

    def _leave(self) -> None:
        if self._path is not None:
            self._path.close()
        self._path, self._group, self._engines = None, "", ()

    def _send_buckets(self, push: _Push) -> PushEnd:
        path = self._path
        assert path is not None

        def send(header: bytes, bucket_N: Tensor) -> None:
            self._check(push)
            key = f"{push.id}/{push.num_announced}"
            try:
                self._store.set(key, header)
                push.num_announced += 1
                path.send(bucket_N, key, lambda: self._check(push), self._stall_s)
            except RuntimeError as error:
                self._leave()
                raise WeightUpdateError(
                    f"sending bucket {push.num_announced} failed: {error}"
                ) from error

        writer = BucketWriter(path.buffer(self._bucket_bytes), send)
        reader = TensorReader(reject_non_finite=self._reject_non_finite, device=path.device)
        reader.read(push.named_tensors, writer.write)
        return writer.end()

    def _end(self, push: _Push, end: PushEnd) -> None:
        """Send the end of the push to the engines, which wait for a plan or for a bucket."""
        store: Any = self._store
        if store is None:
            return
        try:
            if end.fault and not store.check([f"{push.id}/plan"]):
                put(store, f"{push.id}/plan", GroupPlan("", (), "", 0, fault=end.fault))
            put(store, f"{push.id}/{push.num_announced}", end)
        except RuntimeError as error:
            _logger.warning("the end of a push cannot be sent to the engines: %s", error)

    def _remove_keys(self, push: _Push | None) -> None:
        """Remove the keys of an earlier push from the store. No-op for None."""
        if push is None:
            return
        # A disconnected engine that still waits for a removed key reads here that the push is over.
        put(self._store, OVER, push.number)
        for key in ("members", "joined", "plan", *map(str, range(push.num_announced + 1))):
            self._store.delete_key(f"{push.id}/{key}")
        for slot in range(len(self._engines)):
            self._store.delete_key(f"{push.id}/member/{slot}")
        for number in range(push.num_announced):
            self._store.delete_key(f"{push.id}/{number}/taken")


class CudaIpcTransport(CollectiveTransport):
    """A CollectiveTransport without broadcasts, for engines of this machine, which read the
    trainer's GPU.

    Engines map the sender's bucket through CUDA IPC and copy from it. When all engines have copied
    it, the sender refills it. If `place` is "host", the bucket is in shared host memory, for
    engines on CPUs.
    """

    kind = "cuda_ipc"

    def __init__(
        self,
        *,
        place: str = DEVICE,
        bucket_bytes: int = BUCKET_BYTES,
        stall_timeout_s: float = STALL_S,
        reject_non_finite: bool = True,
    ) -> None:
        """`place` is "cuda" or "host". `stall_timeout_s` is how long the engines can take to read
        one bucket. Raises ConfigError for an unknown place or an invalid `bucket_bytes`."""
        require_place(place)
        super().__init__(
            backend=place,
            bucket_bytes=bucket_bytes,
            stall_timeout_s=stall_timeout_s,
            reject_non_finite=reject_non_finite,
        )


# ---- an engine's side


class CollectiveReceiver:
    """Receives pushes for one engine, one at a time. Keeps its group and buffer between pushes."""

    def __init__(self, connect_timeout_s: float = _CONNECT_S) -> None:
        """`connect_timeout_s` is how long the sender's store can take to answer."""
        self._connect_s = connect_timeout_s
        self._id = uuid.uuid4().hex
        self._receiving = threading.Lock()
        self._store: Any = None
        self._store_address = ("", 0)  # host and port
        self._path: BucketPath | None = None
        self._group = ""  # name of the group

    def fetch(self, source: WeightsSource) -> dict[str, Tensor]:
        """Receive a push that is being sent, and return its tensors in new memory. Raises
        WeightUpdateError if the sender disconnects or ends the push, and if the push is incomplete
        or over."""
        if not source.num_members:
            raise WeightUpdateError(
                "weights that were broadcast are not kept; the next push brings them to this engine"
            )
        with self._receiving:
            try:
                return self._receive(source)
            except (RuntimeError, OSError, ValueError, msgspec.MsgspecError) as error:
                self._store = self._path = None
                self._group = ""
                raise WeightUpdateError(
                    f"the broadcasts from {source.address.partition(' ')[0]} ended: {error}; check "
                    "that the trainer is running"
                ) from error

    def _receive(self, source: WeightsSource) -> dict[str, Tensor]:
        where, _, push_id = source.address.partition(" ")
        host, _, port = where.rpartition(":")
        if self._store is None or self._store_address != (host, int(port)):
            self._store = connect_store(host, int(port), self._connect_s)
            self._store_address, self._path, self._group = (host, int(port)), None, ""
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
        """Wait for a key of the push and return its value. Raises WeightUpdateError if the push is
        over."""
        store, number = self._store, int(push_id.partition("-")[0])

        # The sender writes the end of every push, and its exit closes the store. But if this
        # engine was disconnected, the push may be over and its keys removed.
        def check() -> None:
            if read(store.get(OVER), int) >= number:
                raise WeightUpdateError("the push is over; the next one brings the weights")

        return wait_for(store, f"{push_id}/{key}", check)

    def _joined(self, plan: GroupPlan) -> BucketPath:
        """Return this engine's BucketPath in the plan's group. Join the group if needed. Raises
        WeightUpdateError if the plan does not list this engine."""
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
            own_host = host_towards(tcp_address(*self._store_address))
            self._path = Broadcasts(store, plan.group, backend, rank, size, own_host)
        self._group = plan.group
        return self._path
