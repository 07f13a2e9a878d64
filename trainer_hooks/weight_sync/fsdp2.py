"""A policy of transformers under FSDP2, and its checkpoints, which are those of a whole policy.

Every rank holds a part of each parameter, of its gradient and of its optimizer state. A checkpoint
has them whole, so it can be loaded by any number of ranks, or by one process without FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rollout.models.plain_tensors import full_tensor, is_sharded
from trainer_hooks.checkpoint import SavesPretrained
from trainer_hooks.weight_sync import full_tensors, join_push


def shard(policy: nn.Module) -> None:
    """Divide `policy` among all ranks, layer by layer, as its `_no_split_modules` names them.

    In place, and a collective: all ranks hold the same whole policy before.
    """
    mesh = init_device_mesh(next(policy.parameters()).device.type, (dist.get_world_size(),))
    layers = set(getattr(policy, "_no_split_modules", None) or ())
    for module in policy.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def savable(policy: Any, *, is_kept: bool) -> SavesPretrained:
    """What `save_checkpoint` takes of a policy: itself, or what is gathered of a sharded one.

    A collective then. `is_kept`: by this rank, which writes the checkpoint.
    """
    if not any(map(is_sharded, policy.parameters())):
        saves: SavesPretrained = policy
        return saves
    tensors: dict[str, Tensor] = {}
    if is_kept:
        tensors.update(full_tensors(policy))
    else:
        join_push(policy)
    return _Gathered(policy, tensors)


@dataclass(frozen=True, slots=True)
class _Gathered:
    policy: Any
    tensors: dict[str, Tensor]

    def save_pretrained(self, save_directory: str) -> None:
        self.policy.save_pretrained(save_directory, state_dict=self.tensors)


class WholeOptimizer:
    """The state of an optimizer as `save_checkpoint` and `load_checkpoint` take it: of whole
    parameters, whether ranks hold parts of them or not."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def kind(self) -> str:
        """What checkpoints call it: the optimizer's own name, as where no rank holds parts."""
        return type(self._optimizer).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self._optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Gathered: a collective. Each rank gets all of it."""
        state = self._optimizer.state_dict()
        whole = {
            index: {name: _whole(value) for name, value in own.items()}
            for index, own in state["state"].items()
        }
        return {**state, "state": whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict` that all ranks have read. A collective. Raises ValueError if
        it is one of other parameters."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        parts = {
            index: {name: _part(value, parameters[index]) for name, value in whole.items()}
            for index, whole in state_dict["state"].items()
            if index < len(parameters)
        }
        self._optimizer.load_state_dict({**state_dict, "state": parts})


def _whole(value: Any) -> Any:
    return full_tensor(value) if isinstance(value, Tensor) else value


def _part(value: Any, parameter: Tensor) -> Any:
    """This rank's part of a state that has the parameter's shape. A count of steps has none."""
    is_whole = isinstance(value, Tensor) and value.shape == parameter.shape
    if not isinstance(parameter, DTensor) or not is_whole:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
