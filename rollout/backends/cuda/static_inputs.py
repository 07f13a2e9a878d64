"""StaticInputs: the device memory from which captured graphs read their inputs.

GraphExecutor in `rollout.backends.cuda.graph` loads each step's inputs into it before a replay.
Shape letters: T tokens, R rows, E = R + 1, M blocks per table, L logit rows, S samples, P scored
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.backends.cuda.graph_shapes import GraphShape
from rollout.backends.step_tensors import (
    INPUT_TYPES,
    LAYOUT_TYPES,
    HostArray,
    SamplingFlags,
    StepInputs,
    StepLayout,
)

_ALIGNMENT = 16  # bytes
_TYPES = LAYOUT_TYPES | INPUT_TYPES
# A graph must serve any draws. Top-n and ranks are computed after its replay.
_FLAGS = SamplingFlags(
    all_greedy=False,
    any_greedy=True,
    any_truncation=True,
    any_logprobs=True,
    any_ranks=False,
    top_n=0,
)


class StaticInputs:
    """One buffer on the device for all inputs, so that a step needs one copy. Each shape divides
    the buffer in its own way. There are two host buffers, so that a step's inputs can be written
    while the previous step's inputs are still being copied."""

    def __init__(
        self,
        shapes: Iterable[GraphShape],
        max_blocks: int,
        device: torch.device,
        pinned: Callable[[int], Tensor],
    ) -> None:
        """`max_blocks` is the length of the longest block table. `pinned` allocates page-locked
        host memory, flat uint8."""
        self._max_blocks = max_blocks
        num_bytes = max((self._num_bytes(shape) for shape in shapes), default=0)
        self._device_place = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._host_places = (pinned(num_bytes), pinned(num_bytes))
        self._host_index = 0
        self._divided: dict[tuple[GraphShape, int], dict[str, HostArray]] = {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the device buffer."""
        return self._device_place.nbytes

    def on_device(self, shape: GraphShape) -> StepInputs[Tensor]:
        """Return views of the device buffer, as graphs of this shape read them."""
        return _step(shape, self._divide(self._device_place, shape))

    def load(
        self, shape: GraphShape, inputs: StepInputs[HostArray] | None
    ) -> StepInputs[HostArray]:
        """Pad the step's inputs to the shape, start their copy to the device, and return the padded
        inputs on the host. Padding tokens belong to row 0 and write to block 0, which is scratch.
        If `inputs` is None, the step is padding alone."""
        self._host_index = 1 - self._host_index
        place = self._host_places[self._host_index]
        arrays = self._divided.get((shape, self._host_index))
        if arrays is None:
            arrays = {name: t.numpy() for name, t in self._divide(place, shape).items()}
            self._divided[shape, self._host_index] = arrays
        _pad(arrays, shape, inputs)
        num_bytes = self._num_bytes(shape)
        self._device_place[:num_bytes].copy_(place[:num_bytes], non_blocking=True)
        return _step(shape, arrays)

    def _divide(self, place: Tensor, shape: GraphShape) -> dict[str, Tensor]:
        return {
            name: place[start:end].view(getattr(torch, _TYPES[name])).view(dims)
            for name, dims, start, end in self._layout(shape)
        }

    def _num_bytes(self, shape: GraphShape) -> int:
        *_, (_, _, _, end) = self._layout(shape)
        return end

    def _layout(self, shape: GraphShape) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Yield (name, dims, first byte, end byte) of each array."""
        dims_of = {
            "T": (shape.num_tokens,),
            "R": (shape.num_rows,),
            "RM": (shape.num_rows, self._max_blocks),
            "E": (shape.num_rows + 1,),
            "L": (shape.num_rows + shape.num_scores,),
            "S": (shape.num_samples,),
            "P": (0,),
        }
        end = 0
        for name, kind in _TYPES.items():
            dims = dims_of[name.rpartition("_")[2]]
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + math.prod(dims) * np.dtype(kind).itemsize
            yield name, dims, start, end


def _step(shape: GraphShape, arrays: dict[str, Any]) -> StepInputs[Any]:
    layout = StepLayout(
        **{name: arrays[name] for name in LAYOUT_TYPES},
        num_decode_rows=shape.num_decode_rows,
        num_drawn_logits=shape.num_rows,
        only_decodes=False,  # the tokens of padding rows come from token_ids_T
        draws_in_order=not shape.num_prefill_rows,
        flags=_FLAGS,
        score_top_n=0,
        score_ranks=False,
        asks_more_S=np.zeros(shape.num_samples, dtype=np.bool_),
    )
    return StepInputs(layout=layout, **{name: arrays[name] for name in INPUT_TYPES})


def _pad(
    out: dict[str, HostArray], shape: GraphShape, inputs: StepInputs[HostArray] | None
) -> None:
    """Write the padded inputs into `out`. Prefill rows start after the shape's decode rows."""
    for array in out.values():
        array.fill(0)
    out["context_lens_R"].fill(1)
    num_rows, room = 0, shape.num_decode_rows
    out["query_starts_E"][: room + 1] = np.arange(room + 1)
    out["query_starts_E"][room + 1 :] = room
    if inputs is None:
        return
    layout = inputs.layout
    num_rows = layout.num_decode_rows
    for name, target in out.items():
        source = getattr(layout if name in LAYOUT_TYPES else inputs, name)
        kind = name.rpartition("_")[2]
        if kind in ("T", "R", "RM"):
            width = (..., slice(source.shape[-1])) if kind == "RM" else ()
            target[:num_rows][width] = source[:num_rows]
            target[room : room + len(source) - num_rows][width] = source[num_rows:]
        elif kind == "S":
            target[: len(source)] = source
    # The indices of prefill tokens grow by the padding of decode rows.
    indices_L = layout.logit_indices_L + (layout.logit_indices_L >= num_rows) * (room - num_rows)
    drawn, scored = np.split(indices_L, [layout.num_drawn_logits])
    out["logit_indices_L"][: len(drawn)] = drawn
    out["logit_indices_L"][shape.num_rows :][: len(scored)] = scored
    starts_E = layout.query_starts_E[num_rows:] + (room - num_rows)
    out["query_starts_E"][room : room + len(starts_E)] = starts_E
    out["query_starts_E"][room + len(starts_E) :] = starts_E[-1]
