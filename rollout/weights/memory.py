"""WeightMemory: where the parameters of a model lie."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.cpu.residency import resident_bytes
from rollout.models.causal_lm import CausalLM
from rollout.weights.host_stage import aligned

_BUFFER = "weights"


class WeightMemory:
    """One buffer of the backend's memory with all parameters, which can be released and restored.

    `is_resident` is False while it is released. Persistent buffers lie elsewhere, and stay.
    """

    def __init__(self, model: CausalLM, backend: Backend, *, keeps_values: bool) -> None:
        """Move the parameters there, before anything is packed: with their values, or without."""
        self._model, self._memory = model, backend.memory
        self._arena = backend.create_host_arena()
        self._places = dict(_layout(model))
        self.num_bytes = max(end for _, end in self._places.values())
        self.is_resident, self._has_copy = True, False
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        if backend.device.type == "cpu":
            # Pages of a host take memory only once they are written to.
            buffer = self._memory.allocate(_BUFFER, self.num_bytes)
            self._place_parameters(buffer, keeps_values=keeps_values)
            return
        # A device has no room for the weights twice.
        values = self._taken_from_parameters(keeps_values=keeps_values)
        self._memory.trim()
        self._place_parameters(self._memory.allocate(_BUFFER, self.num_bytes))
        for name, parameter in model.named_parameters():
            if keeps_values:
                parameter.data.copy_(values.pop(name))

    @property
    def bytes_N(self) -> Tensor:
        """The buffer, uint8 [N]: all parameters, while resident. Not to be held: it may move."""
        assert self.is_resident, "the weights' memory is released"
        return self._memory.restore(_BUFFER)

    @property
    def num_resident_bytes(self) -> int:
        """Bytes that take memory now; 0 while released."""
        return resident_bytes(self.bytes_N) if self.is_resident else 0

    @property
    def num_bytes_on_host(self) -> int:
        """Bytes of the host copy that waits for `restore`."""
        return self.num_bytes if self._has_copy else 0

    def release(self, *, keeps_values: bool) -> int:
        """Release the memory, after a copy to the host if `keeps_values`. Returns bytes released;
        a second call does nothing.
        """
        if not self.is_resident:
            return 0
        if keeps_values:
            self._arena.reserve(self.num_bytes).copy_(self.bytes_N)
        self.is_resident, self._has_copy = False, keeps_values
        # Since `__init__` weights may have been repacked, which changes their shapes.
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self._model.release_packed()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        return self._memory.release(_BUFFER)

    def restore(self) -> int:
        """Reserve the memory again and copy the values back if they were kept.

        Returns the number of bytes copied; a second call does nothing.
        """
        if self.is_resident:
            return 0
        buffer = self._memory.restore(_BUFFER)
        if self._has_copy:
            buffer.copy_(self._arena.reserve(self.num_bytes))
        self._place_parameters(buffer)
        self._model.refresh()
        num_copied = self.num_bytes_on_host
        self.is_resident, self._has_copy = True, False
        return num_copied

    def _taken_from_parameters(self, *, keeps_values: bool) -> dict[str, Tensor]:
        """Leave the parameters without memory. Returns their values on the host, if wanted."""
        values = {}
        for name, parameter in self._model.named_parameters():
            if keeps_values:
                values[name] = parameter.data.cpu()
            parameter.data = parameter.data.new_empty(0)
        return values

    def _place_parameters(self, buffer: Tensor, *, keeps_values: bool = False) -> None:
        """Make each parameter a view of its part of the buffer, one after the other.

        With `keeps_values` its values move there, and its old memory is free before the next one.
        """
        for name, parameter in self._model.named_parameters():
            start, end = self._places[name]
            place = buffer[start:end].view(parameter.dtype).view(self._shapes[name])
            if keeps_values:
                place.copy_(parameter.data)
            parameter.data = place


def _layout(model: CausalLM) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (first byte, end)) of each parameter; tied ones come once."""
    end = 0
    for name, parameter in model.named_parameters():
        start = aligned(end)
        end = start + parameter.nbytes
        yield name, (start, end)
