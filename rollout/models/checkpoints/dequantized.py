"""Dequantized: a quantised checkpoint, read as if its tensors had been saved unquantised.

Used by `rollout.models.checkpoints.loading` for fp8 and mxfp4 directories. Shape letters: X experts
(optional), N rows, K columns, P blocks of rows, Q blocks of columns, G blocks of a row, B bytes of
a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.errors import ModelError
from rollout.models.checkpoints.reader import Checkpoint, read_tensor, read_tensors
from rollout.models.quantization import FP8, FP8_BLOCK

_FP8_SCALE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"  # suffixes of mxfp4 tensors
_FP8_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_ROWS_AT_ONCE = 8 * FP8_BLOCK  # bounds the temporary memory of a matrix
_MXFP4_BYTES = 16  # bytes of a block: 32 values of 4 bits, which share a scale
_MXFP4_BIAS = 127  # a scale is 2 to the power of its byte minus this
# One sign bit, two exponent bits, one mantissa bit. Source: OCP Microscaling Formats 1.0, 5.3.3.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


class _Entry(NamedTuple):
    """A tensor to yield under `name`, made from the checkpoint's tensors `source` and `scales`.
    `scales` is None for a tensor that is not quantised."""

    name: str
    source: str
    scales: str | None


class Dequantized:
    """The tensors of `checkpoint` under their unquantised names; implements TensorsByName. Tensors
    are read one by one. Quantised tensors are dequantised in float32 and then cast to `dtype`.
    Other tensors keep their dtypes."""

    def __init__(self, checkpoint: Checkpoint, method: str, dtype: torch.dtype) -> None:
        """Match tensors with their scales. `method` is FP8 or MXFP4. Raises ModelError for scales
        without their tensor, for mxfp4 blocks without scales, and for a tensor that comes both
        plain and quantised."""
        self._shards, self._dtype = checkpoint.shards, dtype
        self._paths = {n: path for path, names in checkpoint.shards.items() for n in names}
        entries = _fp8_entries(self._paths) if method == FP8 else _mxfp4_entries(self._paths)
        self._entries = {entry.source: entry for entry in entries}
        self._dequantize = _dequantize_fp8 if method == FP8 else _dequantize_mxfp4

    def keys(self) -> Collection[str]:
        """Return the unquantised names of all tensors. Scales are not listed."""
        return [entry.name for entry in self._entries.values()]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its values. Raises ModelError for a tensor that cannot be
        dequantised, such as an fp8 tensor without scales, and for a file that cannot be read."""
        for path, names in self._shards.items():
            entries = [self._entries[name] for name in names if name in self._entries]
            # Scales are read right after their tensor, if they are in the same file.
            order = [n for e in entries for n in (e.source, e.scales) if n and self._is_in(path, n)]
            tensors = read_tensors(path, order)
            for name, source, scales in entries:
                _, values = next(tensors)
                if scales is None:
                    if values.dtype == torch.float8_e4m3fn:
                        raise ModelError(
                            f"{name!r} has dtype {values.dtype}, but its scales are missing"
                        )
                    yield name, values
                elif self._is_in(path, scales):
                    _, own_scales = next(tensors)
                    yield name, self._dequantize(source, values, own_scales, self._dtype)
                else:
                    own_scales = read_tensor(self._paths[scales], scales)
                    yield name, self._dequantize(source, values, own_scales, self._dtype)

    def _is_in(self, path: Path, name: str) -> bool:
        return self._paths[name] == path


def _fp8_entries(names: Collection[str]) -> Iterator[_Entry]:
    for name in names:
        plain = name.removesuffix(_FP8_SCALE)
        if plain == name:
            scales = name + _FP8_SCALE
            yield _Entry(name, name, scales if scales in names else None)
        elif plain not in names:
            raise ModelError(f"{name!r} has scales for {plain!r}, which is missing")


def _mxfp4_entries(names: Collection[str]) -> Iterator[_Entry]:
    for name in names:
        plain = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        blocks, scales = plain + _BLOCKS, plain + _SCALES
        if plain == name:
            yield _Entry(name, name, None)
            continue
        if plain in names:
            raise ModelError(f"{plain!r} comes twice: plain, and quantised as {name!r}")
        for other in (blocks, scales):
            if other not in names:
                raise ModelError(f"{other!r} is missing beside {name!r}")
        if name == blocks:
            yield _Entry(plain, blocks, scales)


def _dequantize_fp8(
    name: str, values_XNK: Tensor, scales_XPQ: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return each value times the scale of its block, [..., N, K] in `dtype`. Blocks at the end of
    a row or column can be smaller. Raises ModelError if dtypes or shapes do not fit."""
    if values_XNK.dtype != torch.float8_e4m3fn:
        raise ModelError(
            f"{name!r} has scales, but its dtype is {values_XNK.dtype}, not {torch.float8_e4m3fn}"
        )
    if values_XNK.dim() < 2:
        raise ModelError(f"{name!r} has shape {list(values_XNK.shape)}; fp8 needs at least 2 dims")
    *leading, num_rows, num_columns = values_XNK.shape
    grid = [*leading, -(-num_rows // FP8_BLOCK), -(-num_columns // FP8_BLOCK)]
    if list(scales_XPQ.shape) != grid or scales_XPQ.dtype not in _FP8_SCALE_DTYPES:
        raise ModelError(
            f"the scales of {name!r} have shape {list(scales_XPQ.shape)} and dtype "
            f"{scales_XPQ.dtype}; a weight of {list(values_XNK.shape)} needs {grid}, floating"
        )
    plain_XNK = torch.empty(values_XNK.shape, dtype=dtype)
    matrices = zip(
        plain_XNK.view(-1, num_rows, num_columns),
        values_XNK.view(-1, num_rows, num_columns),
        scales_XPQ.view(-1, *grid[-2:]),
        strict=True,
    )
    for plain_NK, values_NK, scales_PQ in matrices:
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            part_NK = values_NK[start : start + _ROWS_AT_ONCE].float()
            first = start // FP8_BLOCK
            scales = scales_PQ[first : first + _ROWS_AT_ONCE // FP8_BLOCK].float()
            scales_NK = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
            part_NK.mul_(scales_NK[: len(part_NK), :num_columns])
            plain_NK[start : start + _ROWS_AT_ONCE].copy_(part_NK)
    return plain_XNK


def _dequantize_mxfp4(
    name: str, blocks_XNGB: Tensor, scales_XNG: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the values of all experts, transposed to [X, K, N], in `dtype`. Raises ModelError if
    dtypes or shapes do not fit."""
    for kind, tensor in (("blocks", blocks_XNGB), ("scales", scales_XNG)):
        if tensor.dtype != torch.uint8:
            raise ModelError(f"the {kind} of {name!r} have dtype {tensor.dtype}, not torch.uint8")
    shape = blocks_XNGB.shape
    if len(shape) != 4 or shape[3] != _MXFP4_BYTES or scales_XNG.shape != shape[:3]:
        raise ModelError(
            f"{name!r} has shape {list(shape)} and scales {list(scales_XNG.shape)}; expected are "
            f"[experts, rows, blocks, {_MXFP4_BYTES}] and [experts, rows, blocks]"
        )
    num_experts, num_rows, num_blocks, _ = shape
    values = torch.tensor(_MXFP4_VALUES)
    plain_XNK = torch.empty(num_experts, num_rows, num_blocks * 2 * _MXFP4_BYTES, dtype=dtype)
    for plain_NK, blocks_NGB, scales_NG in zip(plain_XNK, blocks_XNGB, scales_XNG, strict=True):
        # The lower half of a byte is the first of its two values.
        pairs = torch.stack((blocks_NGB & 15, blocks_NGB >> 4), -1).view(num_rows, num_blocks, -1)
        exponents_NG = scales_NG.int() - _MXFP4_BIAS
        part = torch.ldexp(values[pairs.int()], exponents_NG[..., None])
        plain_NK.copy_(part.view(num_rows, -1))
    return plain_XNK.transpose(1, 2)  # live modules have inputs before outputs
