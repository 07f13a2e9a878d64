"""CudaDriver: calls of CUDA's virtual memory management, which torch does not offer.

Opened by `rollout.backends.cuda.runtime`, used by `rollout.backends.cuda.vmm`. Reserves addresses
and allocates device memory of the process. Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
from typing import Any

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3  # of CUmemAllocationType, -LocationType, -Access_flags
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", MemLocation),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("alloc_flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemLocation), ("flags", ctypes.c_int))


class CudaDriver:
    """The driver's functions as methods, with addresses and handles as ints. Every method raises
    MemoryError if memory was refused, and RuntimeError for any other error, with the function's
    name and the driver's reason."""

    def __init__(self, library: Any) -> None:
        """`library` is a loaded libcuda, initialised by torch."""
        self._library = library

    def has_virtual_memory(self, device: int) -> bool:
        """Return whether the device supports virtual memory management, which all other methods
        need."""
        answer = ctypes.c_int()
        attribute = ctypes.c_int(_HAS_VIRTUAL_MEMORY)
        self._call("cuDeviceGetAttribute", ctypes.byref(answer), attribute, ctypes.c_int(device))
        return bool(answer.value)

    def granularity(self, device: int) -> int:
        """Return the unit of memory in bytes. All sizes and addresses must be multiples of it."""
        size, prop = ctypes.c_size_t(), _prop(device)
        flags = ctypes.c_int(_MINIMUM)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(prop), flags)
        return size.value

    def reserve(self, num_bytes: int) -> int:
        """Reserve address space without memory. Return its address."""
        address, no_flags = ctypes.c_uint64(), ctypes.c_uint64(0)
        anywhere, any_alignment = ctypes.c_uint64(0), ctypes.c_size_t(0)
        size = ctypes.c_size_t(num_bytes)
        self._call(
            "cuMemAddressReserve",
            *(ctypes.byref(address), size, any_alignment, anywhere, no_flags),
        )
        return address.value

    def free_reserved(self, address: int, num_bytes: int) -> None:
        """Free reserved addresses. No memory may be mapped there."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def create(self, num_bytes: int, device: int) -> int:
        """Allocate device memory without an address. Return its handle."""
        handle, prop = ctypes.c_uint64(), _prop(device)
        size, no_flags = ctypes.c_size_t(num_bytes), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(prop), no_flags)
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle. Its memory is freed after it is unmapped."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map all memory of the handle at reserved addresses. Call `allow` before using it."""
        offset, no_flags = ctypes.c_size_t(0), ctypes.c_uint64(0)
        self._call(
            "cuMemMap",
            *(ctypes.c_uint64(address), ctypes.c_size_t(num_bytes), offset),
            *(ctypes.c_uint64(handle), no_flags),
        )

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undo `map`. No running kernel may use the addresses."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def allow(self, address: int, num_bytes: int, device: int) -> None:
        """Allow the device to read and write the memory mapped at `address`."""
        access = AccessDesc(MemLocation(_DEVICE, device), _READ_AND_WRITE)
        where = ctypes.c_uint64(address), ctypes.c_size_t(num_bytes)
        self._call("cuMemSetAccess", *where, ctypes.byref(access), ctypes.c_size_t(1))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        reason = (text.value or b"unknown").decode()
        kind = MemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"{function} failed: {reason} (error {code})")


def _prop(device: int) -> AllocationProp:
    return AllocationProp(type=_PINNED, location=MemLocation(_DEVICE, device))
