"""A backend of vLLM's weight transfer that works on CPUs: broadcasts over gloo.

`register_gloo` makes it known to vLLM's factories under the name "gloo". The engines' end runs in
vLLM's workers, the trainer's in `rollout_vllm.transfer_sender`. Everything but the broadcasts is
vLLM's backend "nccl".
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from rollout.addresses import host_towards, tcp_address
from rollout.parallel.stores import connect_store
from rollout.weights.transports.buckets import Broadcasts

NAME = "gloo"
_CONNECT_S = 20.0
_STALL_S = 20.0  # how long one tensor may take


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker needs to join: the trainer's store, the group's name in it, and ranks. The
    worker's rank is `rank_offset` plus its rank in its engine."""

    master_address: str
    master_port: int
    world_size: int
    group: str
    rank_offset: int


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """As GlooInitInfo, for the sender, which has the `store`."""

    backend: ClassVar[str] = NAME

    master_address: str
    master_port: int
    world_size: int
    group: str
    store: Any


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """The worker's end: loads tensors into the model as they arrive."""

    init_info_cls = GlooInitInfo
    model_update_group: Broadcasts | None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group. Returns when all members have joined."""
        host, port = init_info.master_address, init_info.master_port
        store = connect_store(host, port, _CONNECT_S)
        rank = init_info.rank_offset + self.parallel_config.rank
        own_host = host_towards(tcp_address(host, port))
        size, group = init_info.world_size, init_info.group
        self.model_update_group = Broadcasts(store, group, NAME, rank, size, own_host)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive the tensors in sequence. Raises RuntimeError if the group is broken."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            self.model.load_weights(self._received(update_info))

    def _received(self, info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        assert self.model_update_group is not None, "init_transfer_engine comes first"
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            # Each in new memory: vLLM keeps tensors until their layer is complete.
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            _broadcast(self.model_update_group, tensor)
            yield name, tensor

    def shutdown(self) -> None:
        """Leave the group."""
        self.model_update_group = None


class GlooTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """The sender's end. `send_weights` is that of vLLM's backend "nccl"."""

    init_info_cls = GlooTrainerInitInfo
    model_update_group: Broadcasts | None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None
    ) -> GlooTrainerWeightTransferEngine:
        """Form the group together with the workers."""
        engine = cls(client=client, source=source, packed=False)
        host, size, group = init_info.master_address, init_info.world_size, init_info.group
        for_workers = {
            "master_address": host,
            "master_port": init_info.master_port,
            "world_size": size,
            "group": group,
            "rank_offset": 1,  # this sender is rank 0
        }
        threads = ThreadPoolExecutor(1)
        try:
            joined = threads.submit(client.init_weight_transfer_engine, for_workers)
            engine.model_update_group = Broadcasts(init_info.store, group, NAME, 0, size, host)
            joined.result()
        finally:
            threads.shutdown(wait=False)
        return engine

    def _broadcast(self, source: Any, meta: Any) -> None:
        assert self.model_update_group is not None, "trainer_init comes first"
        for _, tensor in self._checked_iter(source, meta):
            _broadcast(self.model_update_group, tensor)

    def shutdown(self) -> None:
        """Leave the group."""
        self.model_update_group = None


def _broadcast(group: Broadcasts, tensor: Tensor) -> None:
    """Send or receive a contiguous tensor."""
    if tensor.numel():
        group.broadcast(tensor.reshape(-1).view(torch.uint8), _STALL_S)


def register_gloo() -> None:
    """Make the backend known to vLLM in this process. A second call does nothing."""
    with suppress(ValueError):
        WeightTransferEngineFactory.register_engine(NAME, GlooWeightTransferEngine)
    with suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(NAME, GlooTrainerWeightTransferEngine)
