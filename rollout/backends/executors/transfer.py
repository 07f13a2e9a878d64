"""A step's arrays on their way to the device, and its results on their way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, cast

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
from rollout.step.output import StepOutput

# The slots never leave the host.
_RESULTS = tuple(field.name for field in fields(StepOutput) if field.name != "slots")
_OF_SAMPLES = tuple(n for n in _RESULTS if n != "routing" and not n.startswith("score_"))
_LOGITS_INPUTS = tuple(field.name for field in fields(LogitsInputs))


def upload(
    inputs: StepInputs[HostArray], layout: StepLayout[Tensor], device: torch.device
) -> StepInputs[Tensor]:
    """The inputs on the device, beside their `layout`; on a CPU they share the arrays' memory."""
    processing = None
    if inputs.processing is not None:
        processing = LogitsInputs(**_uploaded(inputs.processing, _LOGITS_INPUTS, device))
    tensors = _uploaded(inputs, INPUT_TYPES, device)
    return StepInputs(layout=layout, processing=processing, **tensors)


def upload_layout(layout: StepLayout[HostArray], device: torch.device) -> StepLayout[Tensor]:
    """The layout on the device."""
    tensors: Any = _uploaded(layout, LAYOUT_TYPES, device)
    # replace() is declared to keep the arrays' type.
    return cast("StepLayout[Tensor]", replace(layout, **tensors))


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
        for name in _OF_SAMPLES
        if getattr(result, name) is not None
    }
    return replace(result, **samples)


def without_padding(
    routing_TLK: Tensor | None, layout: StepLayout[HostArray], num_decode_rows: int
) -> Tensor | None:
    """The experts of a step's tokens alone, where its decode rows had room for `num_decode_rows`
    and its prefill rows came after that.
    """
    if routing_TLK is None:
        return None
    decoded, num_prefill = layout.num_decode_rows, len(layout.token_ids_T) - layout.num_decode_rows
    if not num_prefill:
        return routing_TLK[:decoded]
    prefilled_TLK = routing_TLK[num_decode_rows : num_decode_rows + num_prefill]
    return torch.cat([routing_TLK[:decoded], prefilled_TLK]) if decoded else prefilled_TLK


def _uploaded(arrays: object, names: Iterable[str], device: torch.device) -> dict[str, Any]:
    """Return the arrays on the device by name; the host does not wait for the copies."""
    tensors = {name: torch.from_numpy(getattr(arrays, name)) for name in names}
    if device.type == "cpu":
        return tensors
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _to_pinned(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    # Torch keeps pinned memory for later, so this is no allocation in the long run.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _as_arrays(result: StepOutput[Tensor]) -> StepOutput:
    arrays: Any = {
        name: tensor.numpy() for name in _RESULTS if (tensor := getattr(result, name)) is not None
    }
    return StepOutput(**arrays)
