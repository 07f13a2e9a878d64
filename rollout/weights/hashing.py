"""fingerprint_on: what hashes tensors where they lie."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.ops.fingerprint import fingerprint

FingerprintOf = Callable[[Tensor, torch.dtype], Tensor]


def fingerprint_on(device: torch.device) -> FingerprintOf:
    """`Ops.fingerprint` for tensors of the device. The first call for the host may compile it."""
    return cpu_backend("device").ops.fingerprint if device.type == "cpu" else fingerprint
