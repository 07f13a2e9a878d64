"""TritonOps for the contract suites, whose tensors are on the CPU: interpreted, or on a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rollout.backends.cuda.ops import TritonOps
from rollout.backends.forward_batch import SamplingBatch
from rollout.backends.ops.fingerprint import Places
from rollout.step.output import SampleResult, ScoreResult


class DeviceOps(TritonOps):
    """Runs what TritonOps does itself on `device`; its results come back to the CPU.

    Inherited operations are torch's on any device and stay where their tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = False
    ) -> Tensor:
        moved = self._moved(x), self._moved(weight)
        return to_cpu(super().rms_norm(*moved, eps, rounds_first=rounds_first))

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        rounds_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        moved = (self._moved(tensor) for tensor in (x, residual, weight))
        return to_cpu(super().add_rms_norm(*moved, eps, rounds_first=rounds_first))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return to_cpu(super().silu_mul(self._moved(gate_up)))

    def sample(self, logits_SV: Tensor, sampling: SamplingBatch) -> SampleResult[Tensor]:
        fields = {
            field.name: self._moved(getattr(sampling, field.name))
            for field in dataclasses.fields(sampling)
        }
        return to_cpu(super().sample(self._moved(logits_SV), SamplingBatch(**fields)))

    def score(self, logits_PV: Tensor, targets_P: Tensor, top_n: int) -> ScoreResult[Tensor]:
        return to_cpu(super().score(self._moved(logits_PV), self._moved(targets_P), top_n))

    def fingerprint(self, x: Tensor, dtype: torch.dtype, places: Places | None = None) -> Tensor:
        return to_cpu(super().fingerprint(self._moved(x), dtype, places))

    def _moved(self, value: Any) -> Any:
        """Return a tensor's copy on the device with the same strides; other values unchanged."""
        if not isinstance(value, Tensor):
            return value
        storage = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
        moved = storage.to(self._device)
        return moved.as_strided(value.shape, value.stride(), value.storage_offset())


def to_cpu(result: Any) -> Any:
    """Return a tensor, or the tensors of a tuple or a result, on the CPU."""
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, tuple):
        return tuple(to_cpu(part) for part in result)
    if isinstance(result, SampleResult | ScoreResult):
        parts = {f.name: to_cpu(getattr(result, f.name)) for f in dataclasses.fields(result)}
        return type(result)(**parts)
    return result


def device_ops() -> TritonOps:
    """Return TritonOps on a device if there is one, else interpreted on CPU tensors."""
    return DeviceOps(torch.device("cuda")) if torch.cuda.is_available() else TritonOps()
