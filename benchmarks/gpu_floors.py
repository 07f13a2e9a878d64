"""The floors of one machine: how fast its memories copy and its matrix units multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu_device import MeasuredDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorSizes:
    """Bytes on the device and in pinned memory, rows of a square matrix, calls per timing."""

    device_bytes: int
    pinned_bytes: int
    matrix_size: int
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """Bytes and operations per second. A copy counts its bytes once, though it moves them twice:
    `device_copy` of a buffer to another one there, `to_device` and `to_host` from and to pinned
    memory. `device_read` reads a buffer and keeps nothing.
    """

    device_read_bytes_per_s: float
    device_copy_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    matmul_flops_per_s: float

    @property
    def memory_bytes_per_s(self) -> float:
        """The most that the device's memory was seen to deliver: reading, or both sides of a
        copy.
        """
        return max(self.device_read_bytes_per_s, 2 * self.device_copy_bytes_per_s)


def measure_floors(device: MeasuredDevice, sizes: FloorSizes, dtype: torch.dtype) -> Floors:
    """Measure all. The matrices are of `dtype`, with random values: zeros would take less power."""
    source = torch.ones(sizes.device_bytes // 4, device=device.name)
    target = torch.empty_like(source)
    num_calls = sizes.num_calls
    copy_s = device.seconds_per_call(lambda: target.copy_(source), num_calls)
    read_s = device.seconds_per_call(source.sum, num_calls)
    num_pinned = sizes.pinned_bytes // 4
    pinned = torch.zeros(num_pinned, pin_memory=device.is_cuda)
    part = target[:num_pinned]
    up_s = device.seconds_per_call(lambda: part.copy_(pinned, non_blocking=True), num_calls)
    down_s = device.seconds_per_call(lambda: pinned.copy_(part, non_blocking=True), num_calls)
    a, b = (
        torch.randn(sizes.matrix_size, sizes.matrix_size, device=device.name).to(dtype)
        for _ in range(2)
    )
    product_s = device.seconds_per_call(lambda: a @ b, num_calls)
    return Floors(
        device_read_bytes_per_s=source.nbytes / read_s,
        device_copy_bytes_per_s=source.nbytes / copy_s,
        to_device_bytes_per_s=pinned.nbytes / up_s,
        to_host_bytes_per_s=pinned.nbytes / down_s,
        matmul_flops_per_s=2 * sizes.matrix_size**3 / product_s,
    )
