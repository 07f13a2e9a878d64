"""VllmTransport: sends a push by vLLM's trainer-side classes for weight transfer.

`rollout_vllm.engine` makes it for weight_transport="vllm:BACKEND", in the trainer's process.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rollout.errors import ConfigError, WeightUpdateError
from rollout.weights.lora import LoraAdapter
from rollout.weights.source import TensorEntry, WeightsSource, pack_manifest
from rollout.weights.transports.reading import TensorReader
from rollout.weights.transports.sent import (
    OVER,
    RolledBackError,
    SentTransport,
    put,
    read,
    wait_for,
)
from rollout.weights.update import NamedTensors, streamed
from rollout_vllm.gloo_engine import GlooTrainerInitInfo, register_gloo
from rollout_vllm.transfer import FINITE, KIND, Call, Go, Member, pack_payload, require_backend

LATE_S = 5.0
CALL_S = 300.0
_PACKED_BYTES = 1 << 30
_logger = logging.getLogger(__name__)


class _LateError(Exception):
    """The members have not arrived in time."""


class _Push:
    """A push of the sender.

    number: its index, from 1. tensors: what is sent, until it is over. slots: the slots of the
    engines that take part, known when the transfer begins. num_calls: calls of vLLM so far.
    """

    def __init__(self, number: int, source: WeightsSource, tensors: Mapping[str, Tensor]) -> None:
        self.number, self.source, self.tensors = number, source, tensors
        self.id = source.address.split(" ")[1]
        self.slots: Sequence[int] = ()
        self.num_calls = 0
        self.is_over = False


class _Tensors(WeightSource):  # type: ignore[misc]
    """vLLM's interface to the tensors of the running push."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class _Relay:
    """vLLM's VLLMWeightSyncClient: each call is executed by all engines of the running push."""

    def __init__(self, call: Callable[[str, Any], None]) -> None:
        self._call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", None)


class VllmTransport(SentTransport[_Push]):
    """A WeightTransport without a copy: vLLM's workers receive the tensors while they commit.

    `publish` hashes and checks the tensors where they are, and announces their names, shapes,
    dtypes and checksum, on which the engines vote. `send` waits until the engines commit, and lets
    vLLM send. So the tensors are read twice, and must stay valid until the push has ended.

    Like the groups of torch.distributed, a transfer has no passwords: the network must be private.
    """

    def __init__(
        self,
        backend: str,
        host: str = "127.0.0.1",
        *,
        late_s: float = LATE_S,
        call_timeout_s: float = CALL_S,
        reject_non_finite: bool = True,
    ) -> None:
        """backend: a name of `transfer.BACKENDS`. host: an address of this machine that the engines
        reach. late_s: how long the engines that commit wait for the others. call_timeout_s: how
        long the vote may take, and each of vLLM's calls, such as the whole transfer.

        Raises ConfigError for an unknown backend, or if it cannot listen at `host`.
        """
        self._backend, self._name = require_backend(backend), backend
        self._host, self._late_s, self._call_s = host, late_s, call_timeout_s
        self._device = torch.device("cpu")
        if self._backend.is_on_gpu:
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"weight_transport='{KIND}{backend}' sends from a GPU, and this process has "
                    f"none; use {KIND}gloo, or 'shared'"
                )
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._reader = TensorReader(reject_non_finite=reject_non_finite, device=self._device)
        super().__init__(host, call_timeout_s)
        register_gloo()
        self.kind = f"{KIND}{backend}"
        self._sent: _Push | None = None  # the push whose keys are in the store
        self._source, self._relay = _Tensors(), _Relay(self._call)
        self._sender: Any = None  # vLLM's trainer engine, with its group
        self._group, self._engines = "", tuple[str, ...]()

    def publish(self, named_tensors: NamedTensors) -> WeightsSource:
        """Check and announce the tensors. Raises WeightUpdateError also for tensors that can be
        read only once, and for an adapter."""
        self.roll_back()
        if isinstance(named_tensors, LoraAdapter):
            raise WeightUpdateError(
                f"{self.kind!r} carries whole weights only; push merged_tensors(model) of "
                "trainer_hooks.weight_sync in place of the adapter"
            )
        if self._backend.is_on_one_gpu and dist.is_initialized() and dist.get_world_size() > 1:
            raise WeightUpdateError(
                f"{self.kind!r} needs all ranks of the trainer's process group, and one rank "
                "pushes; use weight_transport='cuda_ipc'"
            )
        stream = streamed(named_tensors)
        if not stream.lasts:
            stream.drain()  # other ranks gather with this one
            raise WeightUpdateError(
                f"{self.kind!r} reads the tensors twice, which a sharded model or an iterator does "
                "not allow: push a module or a mapping, or use weight_transport='collective'"
            )
        tensors: dict[str, Tensor] = {}
        checksum = self._reader.read(stream, tensors.__setitem__)
        self._num_pushes += 1
        source = WeightsSource(
            kind=self.kind,
            address=" ".join(
                (
                    f"{self._host}:{self._port}",
                    f"{self._num_pushes}-{uuid.uuid4().hex}",
                    FINITE if self._reader.is_finite else "",
                    _device_id(self._device) if self._backend.is_on_one_gpu else "",
                )
            ),
            manifest=pack_manifest(_entries(tensors)),
            checksum="",
            tensors_checksum=checksum,
            is_kept=False,
        )
        return self._start(_Push(self._num_pushes, source, tensors))

    def send(self, source: WeightsSource) -> None:
        """Wait until the engines commit, and let vLLM send the tensors to them. Returns early if
        the push is rolled back. Raises WeightUpdateError if an engine or vLLM fails."""
        push = self._take(source)
        with self._sending:
            if self._store is None:
                return  # `close` has ended the push
            self._remove_keys(self._sent)
            self._sent = push
            try:
                members = self._arrived(push)
                self._source.tensors = push.tensors
                self._begin(push, members)
                self._sender.send_weights()
            except RolledBackError as error:
                if push.slots:
                    self._leave()
                self._end(push, str(error))
            except BaseException as error:
                self._leave()
                reason = f"{type(error).__name__}: {error}"
                self._end(push, reason)
                if not isinstance(error, Exception):
                    raise
                failure = WeightUpdateError(
                    f"vLLM failed to send weights ({reason}); engines that lack them wait for the "
                    "next push: push again"
                )
                failure.is_transient = True
                raise failure from error
            finally:
                push.is_over, self._source.tensors, push.tensors = True, {}, {}

    # ---- one push, in the thread of `send`

    def _arrived(self, push: _Push) -> list[tuple[Member, int]]:
        """Wait for the first engine that commits, and up to `late_s` for the others. Return them
        with their slots, by engine."""
        store, end = self._store, time.monotonic() + self._call_s

        def check_first() -> None:
            self._check(push)
            if time.monotonic() > end:
                raise WeightUpdateError(f"no engine has begun to commit within {self._call_s:g} s")

        members = [read(wait_for(store, f"{push.id}/member/0", check_first), Member)]
        latest = time.monotonic() + self._late_s

        def check() -> None:
            self._check(push)
            if time.monotonic() > latest:
                raise _LateError

        num_members = members[0].num_members
        try:
            for slot in range(1, num_members):
                encoded = wait_for(store, f"{push.id}/member/{slot}", check)
                members.append(read(encoded, Member))
        except _LateError:
            _logger.warning("%d of %d engines do not commit", num_members - slot, num_members)
        return sorted(
            ((member, slot) for slot, member in enumerate(members)), key=lambda pair: pair[0].engine
        )

    def _begin(self, push: _Push, members: Sequence[tuple[Member, int]]) -> None:
        """Let the members begin. Form their group, unless all have it from the push before."""
        self._check(push)
        push.slots = [slot for _, slot in members]
        engines, offsets, num_workers = [], dict[str, int](), 0
        for member, _ in members:
            engines.append(member.engine)
            offsets[member.engine] = num_workers
            num_workers += member.num_workers
        is_same = all(member.group == self._group for member, _ in members)
        if self._sender is not None and is_same and tuple(engines) == self._engines:
            put(self._store, f"{push.id}/go", Go(self._group, offsets))
            return
        self._leave()
        group = uuid.uuid4().hex
        put(self._store, f"{push.id}/go", Go(group, offsets))
        self._sender = WeightTransferTrainerFactory.trainer_init(
            self._init_info(group, 1 + num_workers), client=self._relay, source=self._source
        )
        self._group, self._engines = group, tuple(engines)

    def _init_info(self, group: str, world_size: int) -> TrainerInitInfo:
        """Return what vLLM's trainer engine needs to form a group."""
        largest = max((t.nbytes for t in self._source.tensors.values()), default=0)
        match self._name:
            case "nccl":
                from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

                port = _free_port(self._host)
                return NCCLTrainerInitInfo(self._host, port, world_size, rank=0)
            case "ipc":
                from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

                size = max(_PACKED_BYTES, largest)
                return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
            case _:
                return GlooTrainerInitInfo(
                    self._host, self._port, world_size, group, self._store, rank=0
                )

    def _call(self, method: str, payload: Any) -> None:
        """Let all engines of the running push execute a call of vLLM, and wait for their answers.
        Raises WeightUpdateError with the first error."""
        push, store = self._sent, self._store
        assert push is not None, "vLLM calls it while a push is sent"
        packed = b"" if payload is None else pack_payload(payload)
        number, push.num_calls = push.num_calls, push.num_calls + 1
        put(store, f"{push.id}/call/{number}", Call(method, packed))
        latest = time.monotonic() + self._call_s

        def check() -> None:
            self._check(push)
            if time.monotonic() > latest:
                raise WeightUpdateError(f"{method}: no answer within {self._call_s:g} s")

        for slot in push.slots:
            if fault := read(wait_for(store, f"{push.id}/answer/{number}/{slot}", check), str):
                raise WeightUpdateError(f"{method} failed in an engine: {fault}")

    def _end(self, push: _Push, fault: str) -> None:
        """Tell engines that wait for the sender that the transfer has ended."""
        store: Any = self._store
        try:
            if not push.slots:
                put(store, f"{push.id}/go", Go("", {}, fault))
            put(store, f"{push.id}/call/{push.num_calls}", Call("", fault=fault))
        except RuntimeError as error:
            _logger.warning("the end of a push cannot be sent to the engines: %s", error)

    def _leave(self) -> None:
        sender, self._sender = self._sender, None
        self._group, self._engines = "", ()
        if sender is not None:
            sender.shutdown()

    def _remove_keys(self, push: _Push | None) -> None:
        """Remove the keys of an earlier push from the store; no-op for None."""
        if push is None:
            return
        put(self._store, OVER, push.number)
        keys = ["joined", "go", *(f"call/{number}" for number in range(push.num_calls + 1))]
        for slot in push.slots:
            keys.append(f"member/{slot}")
            keys.extend(f"answer/{number}/{slot}" for number in range(push.num_calls))
        for key in keys:
            self._store.delete_key(f"{push.id}/{key}")


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return the announcement of tensors, in the order in which they are sent."""
    entries, offset = dict[str, TensorEntry](), 0
    for name, tensor in tensors.items():
        entries[name] = TensorEntry(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=offset,
            num_bytes=tensor.nbytes,
        )
        offset += tensor.nbytes
    return entries


def _device_id(device: torch.device) -> str:
    """Return the name by which vLLM knows a GPU in CUDA IPC."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
