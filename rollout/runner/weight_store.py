"""WeightStore: the model's parameters in one buffer that can be given back and brought again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rollout.backends.base import HostArena, MemoryBackend
from rollout.models.causal_lm import CausalLM

_BUFFER = "weights"
_ALIGNMENT = 64  # bytes: a cache line, and what vector loads like


class WeightStore:
    """Moves a model's parameters into `memory`; `arena` holds them while they are released."""

    def __init__(self, model: CausalLM, memory: MemoryBackend, arena: HostArena) -> None:
        self._model, self._memory, self._arena = model, memory, arena
        self._places = dict(_layout(model))
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        self.num_bytes = max(end for _, end in self._places.values())
        self.is_resident = True
        self.has_values = True  # all bytes are of one set of weights; whoever writes them says so
        values = {name: parameter.data for name, parameter in model.named_parameters()}
        self._carve(memory.allocate(_BUFFER, self.num_bytes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])

    def release(self, *, discard: bool) -> int:
        """Give the memory back, after a host copy unless `discard`. Returns bytes released."""
        if not self.is_resident:
            return 0
        self.has_values = self.has_values and not discard
        if self.has_values:
            self._arena.reserve(self.num_bytes).copy_(self._memory.restore(_BUFFER))
        self.is_resident = False
        self._model.release_packed()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        return self._memory.release(_BUFFER)

    def restore(self) -> int:
        """Have the memory again, with the values if they were kept. Returns bytes copied."""
        if self.is_resident:
            return 0
        buffer = self._memory.restore(_BUFFER)
        if self.has_values:
            buffer.copy_(self._arena.reserve(self.num_bytes))
        self._carve(buffer)
        self._model.refresh()
        self.is_resident = True
        return self.num_bytes if self.has_values else 0

    @property
    def num_bytes_on_host(self) -> int:
        """Bytes of the copy that waits for `restore`."""
        return 0 if self.is_resident or not self.has_values else self.num_bytes

    def _carve(self, buffer: Tensor) -> None:
        for name, parameter in self._model.named_parameters():
            start, end = self._places[name]
            parameter.data = buffer[start:end].view(parameter.dtype).view(self._shapes[name])


def _layout(model: CausalLM) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (first byte, end)) of each parameter; tied ones come once."""
    end = 0
    for name, parameter in model.named_parameters():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + parameter.nbytes
        yield name, (start, end)
