"""MeasuredDevice: clock, memory and synchronisation of the device under test, CUDA's or the CPU."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


class MeasuredDevice:
    """What the measurements ask of a device: "cpu", where there is nothing to wait for, or "cuda",
    the current one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cuda = torch.device(name).type == "cuda"
        self._index = torch.cuda.current_device() if self.is_cuda else None

    def wait(self) -> None:
        """Return when all queued work is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self._index)

    def timed(self, work: Callable[[], _T]) -> tuple[float, _T]:
        """Wall seconds of `work`, from an idle device to an idle device, and what it returned."""
        self.wait()
        start = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - start, result

    def seconds(self, work: Callable[[], Any]) -> float:
        """Wall seconds of `work`, from an idle device to an idle device."""
        return self.timed(work)[0]

    def seconds_per_call(self, work: Callable[[], Any], num_calls: int) -> float:
        """Wall seconds of one of `num_calls` calls queued back to back, after an untimed one."""
        work()

        def all_calls() -> None:
            for _ in range(num_calls):
                work()

        return self.seconds(all_calls) / num_calls

    def free_bytes(self) -> int | None:
        """Bytes that the driver would still give to any process; None on the CPU."""
        return torch.cuda.mem_get_info(self._index)[0] if self.is_cuda else None

    def give_back_unused(self) -> None:
        """Free what nobody refers to any more, torch's own cache included."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        """The kind of device and the versions, never which machine it is."""
        described: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self._index) if self.is_cuda else "cpu",
            "memory_bytes": torch.cuda.mem_get_info(self._index)[1] if self.is_cuda else None,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _triton_version(),
            "python": platform.python_version(),
        }
        return described


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    version: str = triton.__version__
    return version
