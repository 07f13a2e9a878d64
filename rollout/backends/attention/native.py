"""NativePagedAttention: compiled attention that reads blocks in place, for float32 and bfloat16.

Rows that share their first blocks, as samples of one prompt do, read them once. A row's result does
not depend on that, nor on the other rows, nor on the number of threads. Other dtypes and head dims
take the inherited torch path.

Shape letters: T tokens, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from ctypes import addressof
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rollout.backends.attention.torch_sdpa import TorchSdpaAttention
from rollout.backends.base import Ops
from rollout.backends.forward_batch import PLAIN, AttentionTraits, ForwardBatch, Rotation
from rollout.backends.native.kernels import AttentionArgs, Kernels

MAX_HEAD_DIM = 256
MAX_GROUP = 240  # query heads per KV head
_MIN_KV_BYTES_PER_THREAD = 1 << 20  # read in 50 us, which is what a second thread costs
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # the enum of paged_cache.h


class NativePagedAttention(TorchSdpaAttention):
    """Implements `AttentionBackend` on CPU with compiled kernels."""

    def __init__(self, kernels: Kernels, ops: Ops | None = None) -> None:
        super().__init__(ops)
        self._kernels = kernels

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
        """Write K and V at their slots, then attend causally; [T, H, D]."""
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache = batch.kv[layer]
        if not _is_supported(cache, q_THD, k_TGD, v_TGD):
            return super().attend(q_THD, k_TGD, v_TGD, layer, batch, None, traits)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        if traits.sinks_H is not None:
            traits = replace(traits, sinks_H=traits.sinks_H.detach().float().contiguous())
        args = attention_args(q_THD, k_TGD, v_TGD, out_THD, cache, batch, traits)
        self._kernels.write_tokens(addressof(args))
        num_decode, num_rows = batch.num_decode_rows, len(batch.context_lens)
        if num_decode:
            kv_bytes = int(batch.context_lens[:num_decode].sum()) * cache[0, 0].nbytes
            self._decode(args, num_decode, kv_bytes)
        if num_rows > num_decode:
            self._prefill(args, num_decode, num_rows)
        return out_THD

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


def attention_args(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    cache: Tensor,
    batch: ForwardBatch,
    traits: AttentionTraits = PLAIN,
) -> AttentionArgs:
    """The kernels' view of these tensors, which must outlive it; sinks are float32."""
    assert batch.query_starts.dtype == batch.context_lens.dtype == np.int32
    num_tokens, num_kv_heads, head_dim = k_TGD.shape
    return AttentionArgs(
        out_THD.data_ptr(),
        *(q_THD.data_ptr(), k_TGD.data_ptr(), v_TGD.data_ptr()),
        *(cache.data_ptr(), batch.slots_T.data_ptr(), batch.block_tables_RM.data_ptr()),
        *(batch.query_starts.ctypes.data, batch.context_lens.ctypes.data),
        *(q_THD.stride(0), k_TGD.stride(0), v_TGD.stride(0)),
        *(batch.block_tables_RM.stride(0), cache.stride(0), batch.block_size),
        *(num_tokens, q_THD.shape[1], num_kv_heads, head_dim),
        *(CACHE_TYPES[q_THD.dtype], CACHE_TYPES[cache.dtype]),
        window=traits.window or 0,
        sinks=None if traits.sinks_H is None else traits.sinks_H.data_ptr(),
        scale=traits.scale_of(head_dim),
        softcap=traits.softcap or 0.0,
    )


def _is_supported(cache: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> bool:
    """Heads of a multiple of 16, with gaps at most between tokens."""
    head_dim = cache.shape[-1]
    return (
        cache.dtype in CACHE_TYPES
        and q_THD.dtype in CACHE_TYPES
        and q_THD.dtype == k_TGD.dtype == v_TGD.dtype
        and head_dim % 16 == 0
        and head_dim <= MAX_HEAD_DIM
        and q_THD.shape[1] // k_TGD.shape[1] <= MAX_GROUP
        and all(x.stride()[1:] == (head_dim, 1) for x in (q_THD, k_TGD, v_TGD))
    )
