"""BackendLayer: a module that owns weights and leaves the arithmetic to a backend bound later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rollout.backends.base import Backend, Ops
from rollout.layers.shard import Cut
from rollout.parallel.collectives import Collectives


class BackendLayer(nn.Module):
    """A layer that can be built, loaded and saved without a device's operations.

    `bind` gives it those operations; only then can it run. `cuts` says of which of its weights,
    by name, this rank keeps a part.
    """

    ops: Ops[Any]
    collectives: Collectives

    def __init__(self) -> None:
        super().__init__()
        self.cuts: dict[str, Cut] = {}

    def bind(self, backend: Backend) -> None:
        """Use `backend` from now on. Binding again, to the same or another backend, is legal."""
        self.ops, self.collectives = backend.ops, backend.collectives

    def parameter_of(
        self, name: str, shape: Iterable[int], cut: Cut | None, **kind: Any
    ) -> nn.Parameter:
        """A parameter for what `cut` keeps of the weight `name` of this shape; None: all of it."""
        if cut is not None:
            self.cuts[name] = cut
            shape = cut.kept_shape
        return empty_parameter(*shape, **kind)


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter with undefined contents and no gradient: its values come from a checkpoint."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
