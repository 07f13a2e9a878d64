"""BackendLayer: a module that owns weights and leaves the arithmetic to a backend bound later."""

from __future__ import annotations

import torch
from torch import nn

from rollout.backends.base import Backend, Ops


class BackendLayer(nn.Module):
    """A layer that can be built, loaded and saved without a device's operations.

    `bind` gives it those operations; only then can it run.
    """

    ops: Ops

    def bind(self, backend: Backend) -> None:
        """Use `backend` from now on. Binding again, to the same or another backend, is legal."""
        self.ops = backend.ops


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter with undefined contents and no gradient: its values come from a checkpoint."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
