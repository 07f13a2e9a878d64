"""Checks tensors that a trainer announces against the model: their names, dtypes and shapes.

Used by `rollout.serve.control.weight_transfer` before it receives broadcasts.
`rollout.serve.control.process_group` uses TensorMetadata. `ModelTensors.of_directory` reads
config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rollout.errors import WeightUpdateError
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoints.reader import read_config
from rollout.models.spec import ModelSpec
from rollout.models.weights import WeightTable

# The keys are the dtype names of torch, which both protocols send.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_WIDEST_ITEM_BYTES = max(dtype.itemsize for dtype in _DTYPES.values())
_MAX_RANK = 8
_MAX_BYTES = 2**48  # per tensor; a larger size is a mistake or an attack


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """Name, dtype and shape of a tensor that a trainer will send."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_metadata(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[TensorMetadata]:
    """Return the metadata of the tensors whose names, dtypes and shapes are given. Raises
    WeightUpdateError for empty or unequally long lists, and for an invalid dtype or shape."""
    if not len(names) == len(dtypes) == len(shapes):
        raise WeightUpdateError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes were announced; "
            "there must be one of each for every tensor"
        )
    if not names:
        raise WeightUpdateError("the update lists no tensors; name each tensor that it sends")
    announced = []
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = _DTYPES.get(dtype_name.removeprefix("torch."))
        if dtype is None:
            raise WeightUpdateError(
                f"{name!r} has dtype {dtype_name!r}; send one of {', '.join(_DTYPES)}"
            )
        metadata = TensorMetadata(name, dtype, tuple(shape))
        is_small = len(shape) <= _MAX_RANK and all(size >= 0 for size in shape)
        if not is_small or metadata.num_bytes > _MAX_BYTES:
            raise WeightUpdateError(
                f"{name!r} cannot have the shape {list(shape)[:_MAX_RANK]}; send the shape of the "
                "model's tensor"
            )
        announced.append(metadata)
    return announced


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """Names and shapes of a model's tensors, without values.

    table: names and slots of the model's weights.
    shapes: shape of each tensor, by every name under which a trainer can send it.
    dtype: dtype in the model's config.
    """

    table: WeightTable
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @classmethod
    def of_directory(cls, directory: str | Path) -> ModelTensors:
        """Read the tensors' names and shapes from the config.json in `directory`. Raises ModelError
        if the config is bad."""
        spec = ModelSpec.from_hf_config(read_config(Path(directory)))
        table = CausalLM(spec, torch.device("meta")).weight_table()
        shapes = {name: tuple(shape) for name, shape in table.shapes().items()}
        return cls(table, shapes, spec.dtype)

    @property
    def max_bytes(self) -> int:
        """Return the largest size of an update in bytes. It assumes the widest dtype for all
        tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * _WIDEST_ITEM_BYTES

    def check(self, tensor: TensorMetadata) -> None:
        """Raise WeightUpdateError if the model has no tensor of this name and shape. Names that an
        update ignores are accepted (`WeightTable.is_passed_over`)."""
        if self.table.is_passed_over(tensor.name):
            return
        shape = self.shapes.get(tensor.name)
        if shape is None:
            raise WeightUpdateError(
                f"the model has no tensor {tensor.name!r}; send the parameters of the same "
                "architecture under their Hugging Face names"
            )
        if shape != tensor.shape:
            raise WeightUpdateError(
                f"{tensor.name!r} has shape {list(tensor.shape)}, but the model's tensor has shape "
                f"{list(shape)}; send the model's shape"
            )
