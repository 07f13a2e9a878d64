"""A CUDA runtime library, a runtime and a memory saver without a GPU: they record, and are strict.

Memory is the host's, so that what the code under test makes of addresses is really used.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rollout.backends.cuda.cudart import Cudart, Location
from rollout.backends.cuda.driver import CudaDriver
from rollout.backends.cuda.runtime import CudaRuntime, OwnedBytes
from tests.backends.fake_driver import INVALID_VALUE, FakeDriverLibrary


class FakeFunction:
    """A C function that records its arguments as Python values and returns its error code."""

    def __init__(self, library: FakeCudart, name: str) -> None:
        self._library, self._name = library, name
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> Any:
        return self._library.answer(self._name, arguments)


class FakeCudart:
    """Stands for ctypes.CDLL("libcudart.so"). `calls` records every call except queries."""

    def __init__(self, version: int = 13000) -> None:
        self._version = version
        self._managed: dict[int, Any] = {}
        self.registered: dict[int, int] = {}  # address -> bytes
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}  # function -> error code
        self._functions: dict[str, FakeFunction] = {}

    def __getattr__(self, name: str) -> FakeFunction:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return self._functions.setdefault(name, FakeFunction(self, name))

    @property
    def num_managed(self) -> int:
        return len(self._managed)

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "cudaGetErrorString":
            return b"made up"
        if name == "cudaRuntimeGetVersion":
            arguments[0]._obj.value = self._version
            return 0
        self.calls.append((name, *(plain(argument) for argument in arguments)))
        if name in self.fails:
            return self.fails[name]
        return getattr(self, f"_{name}", lambda *_: 0)(*arguments)

    def _cudaMallocManaged(self, pointer: Any, size: Any, flags: Any) -> int:
        memory = (ctypes.c_uint8 * size.value)()
        pointer._obj.value = ctypes.addressof(memory)
        self._managed[ctypes.addressof(memory)] = memory
        return 0

    def _cudaMalloc(self, pointer: Any, size: Any) -> int:
        return self._cudaMallocManaged(pointer, size, None)

    def _cudaIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:
        handle._obj.reserved[:8] = pointer.value.to_bytes(8, "little", signed=True)
        return 0

    def _cudaIpcOpenMemHandle(self, pointer: Any, handle: Any, flags: Any) -> int:
        pointer._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        return 0 if pointer._obj.value in self._managed else INVALID_VALUE

    def _cudaFree(self, pointer: Any) -> int:
        return INVALID_VALUE if self._managed.pop(pointer.value, None) is None else 0

    def _cudaHostRegister(self, pointer: Any, size: Any, flags: Any) -> int:
        if size.value == 0 or pointer.value in self.registered:
            return INVALID_VALUE
        self.registered[pointer.value] = size.value
        return 0

    def _cudaHostUnregister(self, pointer: Any) -> int:
        ctypes.string_at(pointer.value, 1)  # must still be mapped
        return INVALID_VALUE if self.registered.pop(pointer.value, None) is None else 0


def plain(argument: Any) -> Any:
    if isinstance(argument, Location):
        return (argument.type, argument.id)
    return getattr(argument, "value", "out")


class FakeRuntime(CudaRuntime):
    """CudaRuntime over a FakeCudart; `free` and `allocated` are the bytes that it reports."""

    def __init__(self, library: FakeCudart | None = None) -> None:
        self.library = library or FakeCudart()
        self._cudart = Cudart(self.library)
        self.device = torch.device("cpu", 0)
        self.free = 1 << 40
        self.allocated: Iterator[int] = itertools.count(0, -(1 << 40))  # as if all went back
        self.in_cache = 0  # bytes that emptying the cache frees
        self.driver_library = FakeDriverLibrary(self)
        self.driver = CudaDriver(self.driver_library)

    def as_current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return self.free

    def allocated_bytes(self) -> int:
        return next(self.allocated)

    def empty_cache(self) -> None:
        self.library.calls.append(("empty_cache",))
        self.free, self.in_cache = self.free + self.in_cache, 0

    def synchronize(self) -> None:
        self.library.calls.append(("synchronize",))

    def _as_tensor(self, owned: OwnedBytes) -> Tensor:
        interface = owned.__cuda_array_interface__
        memory = (ctypes.c_uint8 * interface["shape"][0]).from_address(interface["data"][0])
        memory.owner = owned
        return torch.frombuffer(memory, dtype=torch.uint8)


class FakeSaver:
    """Stands for torch_memory_saver: an assertion fails where the package would end the process."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.active: dict[str, bool] = {}
        self.mode = "preload"
        self.was_used = False
        self.fails = False

    @property
    def hook_mode(self) -> str:
        raise AttributeError("hook_mode")

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if self.was_used:
            raise AttributeError("_impl_ctor_kwargs")
        self.mode = mode

    @contextlib.contextmanager
    def region(self, *, tag: str, enable_cpu_backup: bool) -> Iterator[None]:
        assert not enable_cpu_backup
        self.was_used = True
        self.events.append(("enter", tag))
        yield
        self.events.append(("leave", tag))
        self.active[tag] = True

    def pause(self, tag: str) -> None:
        self._switch("pause", tag, active=False)

    def resume(self, tag: str) -> None:
        self._switch("resume", tag, active=True)

    def _switch(self, name: str, tag: str, *, active: bool) -> None:
        if self.fails:
            raise OSError("made up")
        assert self.active[tag] is not active, f"the real one ends the process at {name}"
        self.active[tag] = active
        self.events.append((name, tag))

    def as_module(self) -> ModuleType:
        module = ModuleType("torch_memory_saver")
        module.torch_memory_saver = self  # type: ignore[attr-defined]
        return module
