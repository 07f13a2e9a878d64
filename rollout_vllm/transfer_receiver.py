"""WeightReceiver: receives the weights of a VllmTransport into vLLM's workers during the commit.

`rollout_vllm.engine` makes it; the engine's agent calls `fetch`, VllmExecutor the other methods.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore

from rollout.backends.ops.fingerprint import hashed_dtype
from rollout.errors import WeightUpdateError
from rollout.parallel.stores import connect_store
from rollout.weights.fingerprints import fingerprint_on
from rollout.weights.source import WeightsSource
from rollout.weights.transports.sent import OVER, put, read, wait_for
from rollout.weights.update import Fingerprint
from rollout_vllm.gloo_engine import register_gloo
from rollout_vllm.transfer import BACKENDS, FINITE, KIND, Call, Go, Member, unpack_payload

_CONNECT_S = 20.0
_WATCH_S = 0.5
_HANG_S = 10.0  # how long vLLM may take to notice that the sender has ended
_FAULTS = (RuntimeError, OSError, ValueError, msgspec.MsgspecError)
_INIT = "init_weight_transfer_engine"
_UPDATE = "update_weights"
_FINISH = "finish_weight_update"
_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AnnouncedWeights(Mapping[str, Tensor]):
    """The tensors of a push that will arrive during its commit. They are on the meta device.

    is_finite: whether they have no NaN or infinity, by the sender's word. store: the sender's.
    push_id, backend: the push's. slot, num_calls, first_call: this engine's
    slot, the calls that it has executed, and the first one that changes weights; `join` and
    `receive` set them.
    """

    tensors: Mapping[str, Tensor]
    backend: str
    store: Any
    push_id: str
    num_members: int
    is_finite: bool
    slot: int = -1
    num_calls: int = 0
    first_call: Call | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class WeightReceiver:
    """Receives pushes for one engine, one at a time. Keeps its group between pushes."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._id = core, uuid.uuid4().hex
        self._num_workers: int = core.vllm_config.parallel_config.world_size
        self._group, self._rank_offset = "", 0
        is_on_gpu = current_platform.is_cuda_alike()
        # Asked now: workers cannot be asked while weights are staged beside a step.
        self._devices: list[str] = core.collective_rpc(device_id) if is_on_gpu else []

    @property
    def fetchers(self) -> Mapping[str, Callable[[WeightsSource], AnnouncedWeights]]:
        """The function that fetches each kind of WeightsSources."""
        return {f"{KIND}{backend}": self.fetch for backend in BACKENDS}

    # ---- beside steps

    def fetch(self, source: WeightsSource) -> AnnouncedWeights:
        """Return the announced tensors, once the sender has been reached. Any thread may call it.
        Raises WeightUpdateError if the sender cannot be reached, if the push is over, and if this
        engine cannot receive it."""
        if not source.num_members:
            raise WeightUpdateError(
                "weights that vLLM has transferred are not kept; the next push brings them to this "
                "engine"
            )
        backend = source.kind.removeprefix(KIND)
        where, push_id, finite, device = source.address.split(" ")
        self._check_devices(backend, device)
        entries = source.entries().items()
        try:
            host, _, port = where.rpartition(":")
            announced = AnnouncedWeights(
                {name: _meta_tensor(name, each.dtype, each.shape) for name, each in entries},
                backend,
                connect_store(host, int(port), _CONNECT_S),
                push_id,
                source.num_members,
                finite == FINITE,
            )
            _check_running(announced)
        except _FAULTS as error:
            raise WeightUpdateError(
                f"the sender at {where!r} cannot be reached: {error}; check that the trainer is "
                "running"
            ) from error
        return announced

    def _check_devices(self, backend: str, device: str) -> None:
        if BACKENDS[backend].is_on_gpu and not self._devices:
            raise WeightUpdateError(
                f"weight_transport='{KIND}{backend}' sends to GPUs, and this engine has none; use "
                f"{KIND}gloo"
            )
        if BACKENDS[backend].is_on_one_gpu and {*self._devices} != {device}:
            raise WeightUpdateError(
                f"weight_transport='{KIND}{backend}' shares the memory of the trainer's GPU "
                f"{device}, and this engine runs on {', '.join(self._devices)}; use {KIND}nccl"
            )

    # ---- during the commit, in the engine's thread

    def join(self, announced: AnnouncedWeights) -> None:
        """Wait for the sender and the other engines, and join their group. Raises WeightUpdateError
        if there is no transfer; vLLM's weights have not changed then."""
        with _blaming("no transfer has begun"):
            self._join(announced)
            announced.first_call = _next_call(announced)

    def _join(self, announced: AnnouncedWeights) -> None:
        store, key = announced.store, announced.push_id
        announced.slot = store.add(f"{key}/joined", 1) - 1
        member = Member(self._id, self._num_workers, self._group, announced.num_members)
        put(store, f"{key}/member/{announced.slot}", member)
        go = read(_wait(announced, "go"), Go)
        if go.fault:
            raise WeightUpdateError(f"the sender ended the push: {go.fault}")
        if self._id not in go.offsets:
            raise WeightUpdateError("the transfer began without this engine; push again")
        if go.group == self._group:
            return
        self._group, self._rank_offset = "", go.offsets[self._id]
        self._core.collective_rpc(use_backend, args=(announced.backend,))
        self._execute(announced, _next_call(announced))
        self._group = go.group

    def receive(self, announced: AnnouncedWeights) -> dict[str, Fingerprint]:
        """Let vLLM receive the tensors. Returns the fingerprints of what its workers were given.
        Raises WeightUpdateError if the transfer fails; then vLLM's weights are mixed."""
        fingerprints: dict[str, Fingerprint] = {}
        group, self._group = self._group, ""  # a failed transfer breaks the group
        with _blaming("the transfer broke"):
            call, announced.first_call = announced.first_call, None
            while call is not None:
                with _watching(announced):
                    fingerprints |= self._execute(announced, call)
                call = None if call.method == _FINISH else _next_call(announced)
        self._group = group
        return fingerprints

    def _execute(self, announced: AnnouncedWeights, call: Call) -> dict[str, Fingerprint]:
        """Let all workers execute a call, and answer it. Returns the fingerprints of tensors that
        they have loaded."""
        number, fault = announced.num_calls, ""
        announced.num_calls += 1
        try:
            return self._run(call)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            raise
        finally:
            put(announced.store, f"{announced.push_id}/answer/{number}/{announced.slot}", fault)

    def _run(self, call: Call) -> dict[str, Fingerprint]:
        arguments: tuple[Any, ...] = (unpack_payload(call.payload),) if call.payload else ()
        if call.method == _INIT and "rank_offset" in (info := arguments[0]):
            arguments = ({**info, "rank_offset": info["rank_offset"] + self._rank_offset},)
        if call.method != _UPDATE:
            self._core.collective_rpc(call.method, args=arguments)
            return {}
        loaded = self._core.collective_rpc(update_weights, args=arguments)
        if any(each != loaded[0] for each in loaded):
            raise WeightUpdateError("vLLM's workers have received different tensors")
        return {name: (hashed, num_bad) for name, (hashed, num_bad) in loaded[0].items()}


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turn errors of the store, of torch and of vLLM into a WeightUpdateError."""
    try:
        yield
    except WeightUpdateError:
        raise
    except Exception as error:
        raise WeightUpdateError(f"{what} ({type(error).__name__}: {error})") from error


def _check_running(announced: AnnouncedWeights) -> None:
    """Raise WeightUpdateError if the push is over, RuntimeError if the sender has ended."""
    number = int(announced.push_id.partition("-")[0])
    if read(announced.store.get(OVER), int) >= number:
        raise WeightUpdateError("the push is over; the next one brings the weights")


def _wait(announced: AnnouncedWeights, key: str) -> bytes:
    """Wait for a key of the push, and return its value."""
    name = f"{announced.push_id}/{key}"
    return wait_for(announced.store, name, lambda: _check_running(announced))


def _next_call(announced: AnnouncedWeights) -> Call:
    """Wait for the sender's next call. Raises WeightUpdateError if it has ended the transfer."""
    call = read(_wait(announced, f"call/{announced.num_calls}"), Call)
    if call.fault:
        raise WeightUpdateError(f"the sender ended the transfer: {call.fault}")
    return call


@contextmanager
def _watching(announced: AnnouncedWeights) -> Iterator[None]:
    """End this process if the sender ends while vLLM waits for it in a call that cannot be
    interrupted: a supervisor starts the engine again, and the coordinator takes its requests."""
    if not BACKENDS[announced.backend].can_hang:
        yield
        return
    is_done = threading.Event()
    # The call after this one, named before `_execute` counts this one.
    following = f"{announced.push_id}/call/{announced.num_calls + 1}"
    arguments = announced.store, following, is_done
    watch = threading.Thread(target=_watch, args=arguments, daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_done.set()
        watch.join()


def _watch(
    store: Any, key: str, is_done: threading.Event, end: Callable[[int], object] = os._exit
) -> None:
    """End this process if the store closes or gets `key`, and `is_done` is not set soon."""
    while not is_done.wait(_WATCH_S):
        try:
            has_ended = store.check([key])
        except RuntimeError:
            has_ended = True
        if has_ended and not is_done.wait(_HANG_S):
            _logger.critical("the sender of weights has ended, and vLLM waits for it: exiting")
            end(1)
            return


def _meta_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise WeightUpdateError(f"{name!r} has the unknown dtype {dtype!r}")
    return torch.empty(shape, dtype=kind, device="meta")


# ---- in vLLM's workers


def device_id(worker: Any) -> str:
    """Return the name by which vLLM knows the worker's GPU in CUDA IPC."""
    return str(torch.cuda.get_device_properties(_own(worker).device).uuid)


def use_backend(worker: Any, backend: str) -> None:
    """Give the worker a new end of a transfer, in place of a former one."""
    own = _own(worker)
    register_gloo()
    if own.weight_transfer_engine is not None:
        own.weight_transfer_engine.shutdown()
    own._weight_update_active = False  # a transfer that was begun and broke
    own.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend),
        own.vllm_config,
        own.device,
        own.model_runner.get_model(),
    )


def update_weights(worker: Any, update_info: Any) -> dict[str, list[int]]:
    """Let the worker receive and load tensors. Returns their fingerprints, taken as they arrive."""
    own, found = _own(worker), dict[str, Tensor]()
    model = own.weight_transfer_engine.model
    load = model.load_weights
    model.load_weights = lambda weights: load(_hashed(weights, found))
    try:
        own.update_weights(update_info)
    finally:
        del model.load_weights  # the instance's; the class has its own
    return {name: hashed.tolist() for name, hashed in found.items()}


def _hashed(weights: Any, found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    hash_on = cache(fingerprint_on)
    for name, tensor in weights:
        found[name] = hash_on(tensor.device)(tensor, hashed_dtype(tensor.dtype))
        yield name, tensor


def _own(worker: Any) -> Any:
    """Return the worker in vLLM's wrapper."""
    return getattr(worker, "worker", worker)
