"""WeightBackup: the weights as they are, to go back to if replacing them fails."""

from __future__ import annotations

from typing import Any

import torch

from rollout.models.causal_lm import CausalLM


class WeightBackup:
    """Copies only what no packed copy holds: less than all where the backend packs."""

    @torch.no_grad()
    def __init__(self, model: CausalLM) -> None:
        self._layers = list(model.linear_layers().values())
        packed = {layer.weight.data_ptr() for layer in self._layers if layer.packed is not None}
        self._plain = [
            (parameter, parameter.detach().clone())
            for parameter in (*model.parameters(), *model.persistent_buffers().values())
            if parameter.data_ptr() not in packed
        ]
        self._packed: list[Any] = []

    def keep_packed(self) -> None:
        """Hold the packed copies of now, which are about to be replaced."""
        self._packed = [layer.packed for layer in self._layers]

    @torch.no_grad()
    def restore(self) -> None:
        """Write all weights back, and their packed copies."""
        for parameter, values in self._plain:
            parameter.detach().copy_(values)
        for layer, packed in zip(self._layers, self._packed, strict=True):
            layer.restore(packed)
