"""A transformers policy under FSDP2, and checkpoints of it with whole tensors.

Used by `trainer_hooks.train.learner`, for trainer.strategy=fsdp2, and by users' sharded training
loops. `shard` changes the policy in place.

Every rank has a part of each parameter, gradient and optimizer state. A checkpoint has whole
tensors, so any number of ranks can load it, or one process without FSDP2.
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
    """Shard `policy` in place among all ranks, layer by layer. This is a collective.

    The policy's `_no_split_modules` names the layers. Before the call each rank must have the same
    whole policy.
    """
    mesh = init_device_mesh(next(policy.parameters()).device.type, (dist.get_world_size(),))
    layers = set(getattr(policy, "_no_split_modules", None) or ())
    for module in policy.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def savable(policy: Any, *, is_kept: bool) -> SavesPretrained:
    """Return `policy`, or a sharded policy with gathered tensors, for `save_checkpoint`.

    This is a collective for a sharded policy. `is_kept`: True on the rank that writes the
    checkpoint.
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
    """A sharded policy and its whole tensors. `tensors` is empty on ranks that do not save."""

    policy: Any
    tensors: dict[str, Tensor]

    def save_pretrained(self, save_directory: str) -> None:
        self.policy.save_pretrained(save_directory, state_dict=self.tensors)


class WholeOptimizer:
    """An optimizer whose state is whole in checkpoints, even if each rank holds only a part.

    Pass it to `save_checkpoint` and `load_checkpoint`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def kind(self) -> str:
        """Name of the optimizer's class in checkpoints."""
        return type(self._optimizer).__name__

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, gathered on each rank. This is a collective."""
        state = self._optimizer.state_dict()
        whole = {
            index: {name: _whole(value) for name, value in own.items()}
            for index, own in state["state"].items()
        }
        return {**state, "state": whole}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole `state_dict`. This is a collective.

        Raises ValueError for the state of other parameters.
        """
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
    is_whole = isinstance(value, Tensor) and value.shape == parameter.shape
    if not isinstance(parameter, DTensor) or not is_whole:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
