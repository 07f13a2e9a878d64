"""Cudart: the functions of the CUDA runtime library that torch does not offer.

Used by `rollout.backends.cuda.runtime`. Allocates, frees and page-locks memory of the process.
"""

from __future__ import annotations

import ctypes
from typing import Any

HOST = -1  # cudaCpuDeviceId

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_ATTACH_GLOBAL = 1  # cudaMemAttachGlobal
_SET_PREFERRED_LOCATION = 3  # cudaMemAdviseSetPreferredLocation
_LOCATION_DEVICE, _LOCATION_HOST = 1, 2  # cudaMemLocationType
_FIRST_VERSION_WITH_LOCATIONS = 13000


class Location(ctypes.Structure):
    """cudaMemLocation, which CUDA 13 takes by value; CUDA 12 takes a device number."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


class Cudart:
    """The library's functions as methods, with pointers as ints. Every method raises MemoryError if
    memory was refused, and RuntimeError for any other error. The library's error state is cleared,
    so that torch does not report the error again."""

    def __init__(self, library: Any) -> None:
        """`library` is a loaded libcudart of CUDA 12 or 13."""
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self._call("cudaRuntimeGetVersion", ctypes.byref(version))
        self._takes_locations = version.value >= _FIRST_VERSION_WITH_LOCATIONS

    def malloc_managed(self, num_bytes: int) -> int:
        """Allocate managed memory, which the host and the current device share. Return its
        address."""
        pointer = ctypes.c_void_p()
        size, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint(_ATTACH_GLOBAL)
        self._call("cudaMallocManaged", ctypes.byref(pointer), size, flags)
        assert pointer.value is not None
        return pointer.value

    def malloc(self, num_bytes: int) -> int:
        """Allocate memory of the current device. Return its address."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        assert pointer.value is not None
        return pointer.value

    def ipc_handle(self, pointer: int) -> bytes:
        """Return the handle by which other processes open memory allocated by `malloc`."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Open another process's memory on the current device. Return its address in this
        process."""
        pointer, lazy_peer_access = ctypes.c_void_p(), ctypes.c_uint(1)
        given = IpcHandle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, lazy_peer_access)
        assert pointer.value is not None
        return pointer.value

    def ipc_close(self, pointer: int) -> None:
        """Close memory that `ipc_open` opened."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def free(self, pointer: int) -> None:
        """Free memory allocated by `malloc_managed` or `malloc`."""
        self._call("cudaFree", ctypes.c_void_p(pointer))

    def prefer(self, pointer: int, num_bytes: int, place: int) -> None:
        """Make `place`, a device's index or HOST, the preferred location of managed memory."""
        where = self._location(place) if self._takes_locations else ctypes.c_int(place)
        advice = ctypes.c_int(_SET_PREFERRED_LOCATION)
        size = ctypes.c_size_t(num_bytes)
        self._call("cudaMemAdvise", ctypes.c_void_p(pointer), size, advice, where)

    def prefetch(self, pointer: int, num_bytes: int, place: int) -> None:
        """Start to move managed memory to `place`, a device's index or HOST, on the default
        stream."""
        memory = ctypes.c_void_p(pointer), ctypes.c_size_t(num_bytes)
        if self._takes_locations:
            where: tuple[Any, ...] = self._location(place), ctypes.c_uint(0)
        else:
            where = (ctypes.c_int(place),)
        self._call("cudaMemPrefetchAsync", *memory, *where, ctypes.c_void_p(0))

    def host_register(self, pointer: int, num_bytes: int) -> None:
        """Page-lock host memory, for all devices."""
        size, flags = ctypes.c_size_t(num_bytes), ctypes.c_uint(1)  # cudaHostRegisterPortable
        self._call("cudaHostRegister", ctypes.c_void_p(pointer), size, flags)

    def host_unregister(self, pointer: int) -> None:
        """Undo `host_register`."""
        self._call("cudaHostUnregister", ctypes.c_void_p(pointer))

    @staticmethod
    def _location(place: int) -> Location:
        return Location(_LOCATION_HOST, 0) if place == HOST else Location(_LOCATION_DEVICE, place)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code == 0:
            return
        self._library.cudaGetLastError()  # torch would blame its next kernel for it
        reason = self._library.cudaGetErrorString(ctypes.c_int(code)).decode()
        kind = MemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"{function} failed: {reason} (error {code})")
