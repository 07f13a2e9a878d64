"""BackendLayer: the base class of layers, a module that owns weights and lets a backend compute.

Extended by layers in `rollout.layers` and `rollout.models.decoder`. CausalLM calls `bind` after the
weights are loaded. `rollout.models.weight_names` reads `cuts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rollout.backends.base import Backend, Ops
from rollout.layers.shard import Cut
from rollout.parallel.collectives import Collectives


class BackendLayer(nn.Module):
    """A layer that can be built, loaded and saved without a backend, but runs only after `bind`.
    `cuts` has, by weight name, the part of the weight that this rank keeps. A weight without an
    entry is kept whole."""

    ops: Ops[Any]
    collectives: Collectives

    def __init__(self) -> None:
        super().__init__()
        self.cuts: dict[str, Cut] = {}

    def bind(self, backend: Backend) -> None:
        """Use `backend` from now on, in place of any backend bound before."""
        self.ops, self.collectives = backend.ops, backend.collectives

    def parameter_of(
        self, name: str, shape: Iterable[int], cut: Cut | None, **kind: Any
    ) -> nn.Parameter:
        """Return an uninitialised parameter for a weight of `shape`, or for the part that `cut`
        keeps. Records `cut` in `cuts` under `name`."""
        if cut is not None:
            self.cuts[name] = cut
            shape = cut.kept_shape
        return empty_parameter(*shape, **kind)


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter with undefined values that requires no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
