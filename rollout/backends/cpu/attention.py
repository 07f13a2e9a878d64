"""NativePagedAttention: compiled attention that reads blocks in place, for float32 and bfloat16.

Created by `rollout.backends.cpu.backend` and `benchmarks.attention`. `rollout.backends.cpu.decoder`
imports its limits. Writes only the KV cache.

Decode reads a block that several rows share, as samples of one prompt do, only once. A row's result
does not depend on other rows or on the number of threads. Prefill over a bfloat16 cache rounds
queries and weights to bfloat16 if the processor has dot products of bfloat16 pairs, unless the
backend is deterministic. Other dtypes and head dims use the inherited torch path. Shape letters: T
tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from ctypes import addressof
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.backends.base import Ops
from rollout.backends.cpu.kernels import DOT, TYPES, VECTORS, AttentionArgs, Kernels
from rollout.backends.cpu.torch_sdpa import TorchPlan, TorchSdpaAttention
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation

MAX_HEAD_DIM = 576
MAX_GROUP = 240  # query heads per KV head
_MIN_KV_BYTES_PER_THREAD = 1 << 20  # reading them takes 50 us, as much as starting a thread


class NativePlan(TorchPlan):
    """A TorchPlan with the kernels' arguments that all layers of a forward pass share."""

    @cached_property
    def args(self) -> AttentionArgs:
        """Arguments of the kernels. Each layer sets its own fields before a call."""
        batch = self.batch
        assert batch.query_starts.dtype == batch.context_lens.dtype == np.int32
        return AttentionArgs(
            slots=batch.slots_T.data_ptr(),
            tables=batch.block_tables_RM.data_ptr(),
            query_starts=batch.query_starts.ctypes.data,
            context_lens=batch.context_lens.ctypes.data,
            table_stride=batch.block_tables_RM.stride(0),
            block_size=batch.block_size,
        )

    @cached_property
    def num_decode_tokens(self) -> int:
        """Total number of tokens in the contexts of all decode rows."""
        return int(self.batch.context_lens[: self.batch.num_decode_rows].sum())


class NativePagedAttention(TorchSdpaAttention):
    """`AttentionBackend` on CPU with compiled kernels."""

    def __init__(
        self, kernels: Kernels, ops: Ops[Any] | None = None, *, deterministic: bool = False
    ) -> None:
        super().__init__(ops)
        self._kernels = kernels
        self._prefill_units = prefill_units(kernels, deterministic=deterministic)

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with a new NativePlan as its `plan`."""
        return replace(batch, plan=NativePlan(batch))

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None = None,
        traits: AttentionTraits = PLAIN,
    ) -> Tensor:
        """Norm and rotate Q and K, write K and V, and attend causally. Return [T, H, D]."""
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache = batch.kv[layer]
        if not _is_supported(cache, q_THD, k_TGD, v_TGD):
            return super().attend(q_THD, k_TGD, v_TGD, layer, batch, None, traits)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        sinks_H = None if traits.sinks_H is None else traits.sinks_H.detach().float().contiguous()
        args = batch.plan.args
        set_tensors(args, q_THD, k_TGD, v_TGD, out_THD, cache)
        set_traits(args, traits, sinks_H)
        args.unit = self._prefill_units[cache.dtype]
        self._kernels.write_tokens(addressof(args))
        num_decode, num_rows = batch.num_decode_rows, len(batch.context_lens)
        if num_decode:
            token_bytes = cache.stride(1) * cache.itemsize
            self._decode(args, num_decode, batch.plan.num_decode_tokens * token_bytes)
        if num_rows > num_decode:
            self._prefill(args, num_decode, num_rows)
        # If V is a part of K, the kernels have also summed K's other dims, which are cut off here.
        return out_THD if cache.shape[2] == 2 else out_THD[..., : v_TGD.shape[2]]

    def _decode(self, args: AttentionArgs, num_rows: int, kv_bytes: int) -> None:
        num_parts = max(1, min(torch.get_num_threads(), kv_bytes // _MIN_KV_BYTES_PER_THREAD))

        def work(first: int, last: int) -> None:
            for part in range(first, last):
                self._kernels.attend_decode_part(addressof(args), 0, num_rows, part, num_parts)

        self._kernels.split(num_parts, work)

    def _prefill(self, args: AttentionArgs, first_row: int, end_row: int) -> None:
        num_parts = torch.get_num_threads()

        def work(first: int, last: int) -> None:
            scratch = torch.empty(self._kernels.prefill_scratch_bytes(), dtype=torch.uint8)
            for part in range(first, last):
                self._kernels.attend_prefill_part(
                    *(addressof(args), scratch.data_ptr(), first_row, end_row, part, num_parts)
                )

        self._kernels.split(num_parts, work)


def set_tensors(
    args: AttentionArgs,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    cache: Tensor,
) -> None:
    """Set addresses and sizes of a layer's tensors in `args`. The tensors must outlive `args`."""
    args.out, args.cache = out_THD.data_ptr(), cache.data_ptr()
    args.q, args.k, args.v = q_THD.data_ptr(), k_TGD.data_ptr(), v_TGD.data_ptr()
    args.q_stride, args.k_stride, args.v_stride = q_THD.stride(0), k_TGD.stride(0), v_TGD.stride(0)
    args.block_stride = cache.stride(0)
    args.tokens, args.heads, args.dim = q_THD.shape
    args.kv_heads, args.planes = k_TGD.shape[1], cache.shape[2]
    args.token_type, args.cache_type = TYPES[q_THD.dtype], TYPES[cache.dtype]


def set_traits(args: AttentionArgs, traits: AttentionTraits, sinks_H: Tensor | None) -> None:
    """Set scale, window, softcap and sinks in `args`. `sinks_H`, float32, must outlive `args`."""
    args.window, args.softcap = traits.window or 0, traits.softcap or 0.0
    args.sinks = None if sinks_H is None else sinks_H.data_ptr()
    args.scale = traits.scale_of(args.dim)


def prefill_units(kernels: Kernels, *, deterministic: bool) -> dict[torch.dtype, int]:
    """Return which kernel unit prefill uses for each cache dtype: VECTORS or DOT. With
    `deterministic` it is VECTORS as in decode, so that prefill and decode give the same bits."""
    has_pairs = not deterministic and kernels.dot_is_usable()
    return {torch.float32: VECTORS, torch.bfloat16: DOT if has_pairs else VECTORS}


def _is_supported(cache: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> bool:
    head_dim = cache.shape[-1]
    return (
        cache.dtype in TYPES
        and q_THD.dtype in TYPES
        and q_THD.dtype == k_TGD.dtype == v_TGD.dtype
        and head_dim % 16 == 0
        and head_dim <= MAX_HEAD_DIM
        and q_THD.shape[1] // k_TGD.shape[1] <= MAX_GROUP
        and all(_has_gapless_heads(x) for x in (q_THD, k_TGD))
        and (cache.shape[2] == 1 or _has_gapless_heads(v_TGD))
    )


def _has_gapless_heads(x_THD: Tensor) -> bool:
    return x_THD.stride()[1:] == (x_THD.shape[2], 1)
