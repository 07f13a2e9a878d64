"""StagedWeights: a verified update that waits for its commit, and what it takes to go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.models.causal_lm import CausalLM
from rollout.runner.weight_shares import WeightShare


class WeightBackup:
    """A copy of the weights that serve now, from which they are restored if replacing them fails.

    It copies only what no packed copy holds: less than all weights where the backend packs them. A
    weight that is packed in its own memory leaves its old values in what was staged for it.
    """

    @torch.no_grad()
    def __init__(self, model: CausalLM) -> None:
        self._layers = list(model.linear_layers().values())
        packed = {
            layer.weight.data_ptr()
            for layer in self._layers
            if layer.packed is not None or layer.repacked is not None
        }
        self._plain = [
            (parameter, parameter.detach().clone())
            for parameter in (*model.parameters(), *model.persistent_buffers().values())
            if parameter.data_ptr() not in packed
        ]
        self._packed: list[tuple[Any, Any]] = []

    def keep_packed(self, staged: Sequence[Any]) -> None:
        """Keep the packed copies that serve now, which `staged` is about to replace."""
        served = [layer.packed for layer in self._layers]
        self._packed = list(zip(served, staged, strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Write all weights back, and their packed copies."""
        for parameter, values in self._plain:
            parameter.detach().copy_(values)
        for layer, (packed, staged) in zip(self._layers, self._packed, strict=True):
            layer.restore(packed, staged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What served before a commit, the `num_writes`-th."""

    num_writes: int
    backup: WeightBackup
    version: int
    had_values: bool
    bases: Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True)
class StagedWeights:
    """A verified update, which can be committed once. Only ServedWeights changes it.

    `tensors` are the source tensors that a commit copies, tied ones once; the others are there as
    `packed`, what the backend packed for each linear layer. `backup` holds the weights that were
    served after `num_writes` writes. `num_bytes` is the size of the weights that change: all, but
    under an adapter. `bases` has what adapted weights are without it. `follows_served`: it is an
    adapter on the weights that were served. `started_at` is when staging began, on the clock of
    time.perf_counter; `seconds` is how long it took. `share`: this rank's of its fingerprints;
    `checksum` is "" until it is accepted with those of all ranks. `is_spent`: a commit has begun
    and was not undone. `replaced`: what the commit has replaced. `elsewhere`: what the other
    ranks have staged, which ends with this.
    """

    tensors: Mapping[str, Tensor]
    packed: Sequence[Any]
    backup: WeightBackup
    num_writes: int
    num_bytes: int
    bases: Mapping[str, Tensor]
    follows_served: bool
    share: WeightShare
    is_spent: bool = False
    replaced: Replaced | None = None
    elsewhere: Any = None
    checksum: str
    started_at: float
    seconds: float
