"""Copies a step's arrays to the device, and its results back to the host.

Used by `rollout.backends.executors.eager`, `rollout.backends.cuda.graph` and
`rollout.backends.cuda.cuda_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rollout.backends.step_tensors import (
    INPUT_TYPES,
    LAYOUT_TYPES,
    Fetch,
    HostArray,
    LogitsInputs,
    StepInputs,
    StepLayout,
)
from rollout.step.output import StepOutput, map_arrays

_LOGITS_INPUTS = tuple(field.name for field in fields(LogitsInputs))
_ALIGNMENT = 16  # bytes


def upload(
    inputs: StepInputs[HostArray], layout: StepLayout[Tensor] | None, device: torch.device
) -> StepInputs[Tensor]:
    """Return the inputs as tensors on the device. `layout` is the inputs' layout on the device. If
    it is None, the layout is copied, too. On a CPU the tensors share the arrays' memory. On a GPU
    all arrays go in one copy, and the host does not wait for it."""
    if device.type == "cpu":
        return _with_tensors(inputs, layout, torch.from_numpy)
    arrays: list[HostArray] = []
    _with_tensors(inputs, layout, arrays.append)  # collects the arrays
    tensors = iter(_in_one_copy(arrays, device))
    return _with_tensors(inputs, layout, lambda array: next(tensors))


def _with_tensors(
    inputs: StepInputs[HostArray],
    layout: StepLayout[Tensor] | None,
    tensor_of: Callable[[HostArray], Any],
) -> StepInputs[Tensor]:
    """Return the inputs with each array replaced by `tensor_of(array)`, called in a fixed order.
    The new layout is `layout`. If `layout` is None, the layout's arrays are replaced, too."""
    own: Any = {name: tensor_of(getattr(inputs, name)) for name in INPUT_TYPES}
    if layout is None:
        of_layout: Any = {name: tensor_of(getattr(inputs.layout, name)) for name in LAYOUT_TYPES}
        # replace() is declared to keep the arrays' type.
        layout = cast("StepLayout[Tensor]", replace(inputs.layout, **of_layout))
    processing = None
    if inputs.processing is not None:
        of_logits: Any = {n: tensor_of(getattr(inputs.processing, n)) for n in _LOGITS_INPUTS}
        processing = LogitsInputs(**of_logits)
    return StepInputs(layout=layout, processing=processing, **own)


def _in_one_copy(arrays: list[HostArray], device: torch.device) -> list[Tensor]:
    def pinned(num_bytes: int) -> Tensor:
        # Torch caches pinned memory, and does not reuse it while a copy reads it.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    return sent_together(arrays, pinned, lambda place: place.to(device, non_blocking=True))


def sent_together(
    arrays: list[HostArray], allocate: Callable[[int], Tensor], send: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Pack the arrays into one host buffer of `allocate` and `send` the buffer. Return the arrays
    as views of the result of `send`."""
    starts, end = [], 0
    for array in arrays:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + array.nbytes
    place = allocate(end)
    on_host = place.numpy()
    for start, array in zip(starts, arrays, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_host[start : start + array.nbytes] = flat
    sent = send(place)
    return [
        sent[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def download(result: StepOutput[Tensor], device: torch.device) -> Fetch:
    """Start the copy of the result to the host. The returned function waits for the result."""
    if device.type == "cpu":
        return lambda: map_arrays(result, Tensor.numpy)
    on_host = map_arrays(result, _to_pinned)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(device))

    def fetch() -> StepOutput:
        arrived.synchronize()
        return map_arrays(on_host, Tensor.numpy)

    return fetch


def _to_pinned(tensor: Tensor) -> Tensor:
    # Torch caches pinned memory, so that later steps allocate nothing.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
