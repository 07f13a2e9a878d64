"""DeviceMemory: plain buffers, released by dropping them, restored by allocating anew."""

from __future__ import annotations

from torch import Tensor

from rollout.backends.memory.mapping import map_bytes, trim_heap


class DeviceMemory:
    """Implements `MemoryBackend`. Memory goes back once the caller has dropped its own views, too.

    Each buffer is a mapping of its own, so that the system gets the memory at once.
    """

    has_stable_addresses = False

    def __init__(self) -> None:
        self._num_bytes: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def allocate(self, name: str, num_bytes: int) -> Tensor:
        """A flat uint8 tensor, zero-filled. Raises ConfigError if the memory is not to be had."""
        assert name not in self._num_bytes, f"buffer {name!r} exists"
        self._tensors[name] = map_bytes(name, num_bytes).tensor
        self._num_bytes[name] = num_bytes
        return self._tensors[name]

    def release(self, name: str) -> int:
        """Drop the buffer. Returns its bytes, 0 if it was released already."""
        if self._tensors.pop(name, None) is None:
            return 0
        trim_heap()
        return self._num_bytes[name]

    def trim(self) -> None:
        """Nothing: `release` has done it."""

    def restore(self, name: str) -> Tensor:
        """The buffer, allocated anew if it was released; its address may differ."""
        if name not in self._tensors:
            self._tensors[name] = map_bytes(name, self._num_bytes[name]).tensor
        return self._tensors[name]
