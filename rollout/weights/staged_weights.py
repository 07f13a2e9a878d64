"""StagedWeights: a verified update that waits for its commit, and what it takes to go back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.models.causal_lm import CausalLM
from rollout.weights.fingerprints import WeightShare
from rollout.weights.staged import Replacement


class PackedCopies:
    """The packed copies of the linear layers' weights that serve now, and what is to replace them.

    A weight that is packed in its own memory leaves its old values in what was staged for it.
    """

    def __init__(self, model: CausalLM, staged: Sequence[Any]) -> None:
        self._layers = list(model.linear_layers().values())
        self._served = [layer.packed for layer in self._layers]
        self._staged = staged

    @torch.no_grad()
    def restore(self) -> None:
        """Serve them again, once all weights that are not packed have their old values."""
        for layer, packed, staged in zip(self._layers, self._served, self._staged, strict=True):
            layer.restore(packed, staged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What served before a commit, the `num_writes`-th, and after the `num_writes_before`-th."""

    num_writes: int
    num_writes_before: int
    packed: PackedCopies
    version: int
    had_values: bool
    was_finite: bool
    bases: Mapping[str, Tensor]


@dataclass(slots=True, kw_only=True)
class StagedWeights:
    """A verified update, which can be committed once. Only ServedWeights changes it.

    `replacement` puts the weights in place that have no packed form of their own; the others are
    there as `packed`, what the backend packed for each linear layer. It was staged after
    `num_writes` writes. `num_bytes` is the size of the weights that change: all, but
    under an adapter. `bases` has what adapted weights are without it. `follows_served`: it is an
    adapter on the weights that were served. `started_at` is when staging began, on the clock of
    time.perf_counter; `seconds` is how long it took. `share`: this rank's of its fingerprints;
    `checksum` is "" until it is accepted with those of all ranks, as is `is_finite`: whether no
    weight has NaN or infinity. `is_spent`: a commit has begun
    and was not undone. `replaced`: what the commit has replaced. `elsewhere`: what the other
    ranks have staged, which ends with this.
    """

    replacement: Replacement
    packed: Sequence[Any]
    num_writes: int
    num_bytes: int
    bases: Mapping[str, Tensor]
    follows_served: bool
    share: WeightShare
    is_spent: bool = False
    replaced: Replaced | None = None
    elsewhere: Any = None
    checksum: str
    is_finite: bool
    started_at: float
    seconds: float
