"""DeviceBytes: a recording allocator: what tensors take of a device, now and at most."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceBytes(TorchDispatchMode):
    """The bytes of all tensors on a device that were made inside and are alive, and their peak."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self._device = device
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def alive(self) -> int:
        self._storages = {
            key: entry for key, entry in self._storages.items() if not entry[0].expired()
        }
        return sum(num_bytes for _, num_bytes in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device and storage._cdata not in given:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.alive)
        return result


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
