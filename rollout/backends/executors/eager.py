"""EagerExecutor: call the forward pass as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollout.backends.forward_batch import ForwardBatch


class EagerExecutor:
    """Implements `Executor`."""

    def run(self, forward: Callable[[ForwardBatch], Tensor], batch: ForwardBatch) -> Tensor:
        """forward(batch) without autograd."""
        with torch.inference_mode():
            return forward(batch)
