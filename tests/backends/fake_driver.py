"""libcuda's virtual memory calls without a GPU: strict, and on the host's memory."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any, Protocol

from rollout.backends.cuda.driver import AccessDesc, AllocationProp

OUT_OF_MEMORY, INVALID_VALUE = 2, 1
GRANULARITY = 2 << 20
LOST = 0xA5  # what memory holds that has come anew


class FreeBytes(Protocol):
    """An object that counts the device's free memory."""

    free: int


class FakeDriverLibrary:
    """Stands for ctypes.CDLL("libcuda.so.1"). Memory is taken from `runtime.free`.

    `fails`: error codes by function. `calls`: names of all calls. What the real one would answer
    with an error is one here; what would crash a kernel is not seen.
    """

    def __init__(self, runtime: FreeBytes) -> None:
        self._runtime = runtime
        self._handles = itertools.count(1)
        self._hosts: dict[int, Any] = {}
        self.reserved: dict[int, int] = {}  # address -> bytes
        self.memory: dict[int, int] = {}  # handle -> bytes, released or not
        self.released: set[int] = set()
        self.mapped: dict[int, int] = {}  # address -> handle
        self.accessible: set[int] = set()
        self.fails: dict[str, int] = {}
        self.calls: list[str] = []
        self.has_virtual_memory = 1

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return self.fails.get(name) or int(getattr(self, f"_{name}")(*arguments))

        return call

    def cuGetErrorString(self, code: Any, text: Any) -> int:
        del code
        text._obj.value = b"made up"
        return 0

    def _cuDeviceGetAttribute(self, answer: Any, attribute: Any, device: Any) -> int:
        assert (attribute.value, device.value) == (102, 0)
        answer._obj.value = self.has_virtual_memory
        return 0

    def _cuMemGetAllocationGranularity(self, size: Any, prop: Any, flags: Any) -> int:
        assert flags.value == 0
        size._obj.value = GRANULARITY
        return self._refused(prop)

    def _cuMemAddressReserve(
        self, address: Any, size: Any, alignment: Any, wanted: Any, flags: Any
    ) -> int:
        assert alignment.value == wanted.value == flags.value == 0
        if size.value == 0 or size.value % GRANULARITY:
            return INVALID_VALUE
        host = (ctypes.c_uint8 * (size.value + GRANULARITY))()
        start = -(-ctypes.addressof(host) // GRANULARITY) * GRANULARITY
        self._hosts[start], self.reserved[start] = host, size.value
        address._obj.value = start
        return 0

    def _cuMemAddressFree(self, address: Any, size: Any) -> int:
        if self.reserved.get(address.value) != size.value or address.value in self.mapped:
            return INVALID_VALUE
        del self.reserved[address.value], self._hosts[address.value]
        return 0

    def _cuMemCreate(self, handle: Any, size: Any, prop: Any, flags: Any) -> int:
        assert flags.value == 0
        if size.value == 0 or size.value % GRANULARITY:
            return INVALID_VALUE
        if size.value > self._runtime.free:
            return OUT_OF_MEMORY
        self._runtime.free -= size.value
        handle._obj.value = next(self._handles)
        self.memory[handle._obj.value] = size.value
        return self._refused(prop)

    def _cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert offset.value == flags.value == 0
        is_whole = self.reserved.get(address.value) == size.value == self.memory.get(handle.value)
        if not is_whole or address.value in self.mapped or handle.value in self.released:
            return INVALID_VALUE
        self.mapped[address.value] = handle.value
        ctypes.memset(address.value, LOST, size.value)
        return 0

    def _cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        wanted: AccessDesc = access._obj
        assert (wanted.location.type, wanted.location.id, wanted.flags, count.value) == (1, 0, 3, 1)
        if address.value not in self.mapped or self.reserved[address.value] != size.value:
            return INVALID_VALUE
        self.accessible.add(address.value)
        return 0

    def _cuMemUnmap(self, address: Any, size: Any) -> int:
        if address.value not in self.mapped or self.reserved[address.value] != size.value:
            return INVALID_VALUE
        handle = self.mapped.pop(address.value)
        self.accessible.discard(address.value)
        self._free_unused(handle)
        return 0

    def _cuMemRelease(self, handle: Any) -> int:
        if handle.value not in self.memory or handle.value in self.released:
            return INVALID_VALUE
        self.released.add(handle.value)
        self._free_unused(handle.value)
        return 0

    def _free_unused(self, handle: int) -> None:
        """Memory goes back once it is released and mapped nowhere."""
        if handle in self.released and handle not in self.mapped.values():
            self._runtime.free += self.memory.pop(handle)
            self.released.remove(handle)

    def _refused(self, prop: Any) -> int:
        given: AllocationProp = prop._obj
        assert ctypes.sizeof(AllocationProp) == 32
        is_right = (given.type, given.location.type, given.location.id) == (1, 1, 0)
        return 0 if is_right else INVALID_VALUE
