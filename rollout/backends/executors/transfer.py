"""A step's arrays on their way to the device, and its results on their way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from rollout.backends.step_tensors import (
    INPUT_TYPES,
    Fetch,
    HostArray,
    LogitsInputs,
    StepInputs,
)
from rollout.step.output import StepOutput

_RESULTS = tuple(field.name for field in fields(StepOutput))
_LOGITS_INPUTS = tuple(field.name for field in fields(LogitsInputs))


def upload(inputs: StepInputs[HostArray], device: torch.device) -> StepInputs[Tensor]:
    """The inputs on the device; on a CPU they share the arrays' memory."""
    tensors: Any = _uploaded(inputs, INPUT_TYPES, device)
    if inputs.processing is not None:
        on_device: Any = _uploaded(inputs.processing, _LOGITS_INPUTS, device)
        tensors["processing"] = LogitsInputs(**on_device)
    # replace() is declared to keep the arrays' type.
    return cast("StepInputs[Tensor]", replace(inputs, **tensors))


def download(result: StepOutput[Tensor], device: torch.device) -> Fetch:
    """Queue the result's way to the host; the function returned waits for it."""
    if device.type == "cpu":
        return lambda: _as_arrays(result)
    pinned: Any = {name: _to_pinned(getattr(result, name)) for name in _RESULTS}
    on_host: StepOutput[Tensor] = StepOutput(**pinned)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))

    def fetch() -> StepOutput:
        arrived.synchronize()
        return _as_arrays(on_host)

    return fetch


def first_samples(result: StepOutput[Tensor], count: int) -> StepOutput[Tensor]:
    """The result without the samples from `count` on."""
    samples: Any = {
        name: getattr(result, name)[:count]
        for name in _RESULTS
        if not name.startswith("score_") and getattr(result, name) is not None
    }
    return replace(result, **samples)


def _uploaded(arrays: object, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays on the device by name; the host does not wait for the copies."""
    return {
        name: torch.from_numpy(getattr(arrays, name)).to(device, non_blocking=True)
        for name in names
    }


def _to_pinned(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    # Torch keeps pinned memory for later, so this is no allocation in the long run.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _as_arrays(result: StepOutput[Tensor]) -> StepOutput:
    tensors = {name: getattr(result, name) for name in _RESULTS}
    arrays: Any = {name: None if t is None else t.numpy() for name, t in tensors.items()}
    return StepOutput(**arrays)
