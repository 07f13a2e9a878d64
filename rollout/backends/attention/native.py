"""NativePagedAttention: compiled attention that reads blocks in place, for float32.

Other dtypes and head dims take the inherited torch path. Shape letters: T tokens, H query heads, G
key/value heads, D head dim.
"""

from __future__ import annotations

from ctypes import addressof

import numpy as np
import torch
from torch import Tensor

from rollout.backends.attention.torch_sdpa import TorchSdpaAttention
from rollout.backends.base import Ops
from rollout.backends.forward_batch import ForwardBatch, Rotation
from rollout.backends.native.kernels import AttentionArgs, Kernels

_MAX_HEAD_DIM = 256
_MIN_ROWS_PER_THREAD = 8  # decode rows, some 50 us each


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
    ) -> Tensor:
        """Write K and V at their slots, then attend causally; [T, H, D]."""
        q_THD, k_TGD = self.rotate(q_THD, k_TGD, rotation)
        cache = batch.kv[layer]
        if not _is_supported(cache, q_THD, k_TGD, v_TGD):
            return super().attend(q_THD, k_TGD, v_TGD, layer, batch)
        out_THD = torch.empty(q_THD.shape, dtype=torch.float32)
        query_starts = np.ascontiguousarray(batch.query_starts, dtype=np.int32)
        context_lens = np.ascontiguousarray(batch.context_lens, dtype=np.int32)
        num_tokens, num_kv_heads, head_dim = k_TGD.shape
        args = AttentionArgs(
            out_THD.data_ptr(),
            *(q_THD.data_ptr(), k_TGD.data_ptr(), v_TGD.data_ptr()),
            *(cache.data_ptr(), batch.slots_T.data_ptr(), batch.block_tables_RM.data_ptr()),
            *(query_starts.ctypes.data, context_lens.ctypes.data),
            *(q_THD.stride(0), k_TGD.stride(0), v_TGD.stride(0)),
            *(batch.block_tables_RM.stride(0), cache.stride(0), batch.block_size),
            *(num_tokens, q_THD.shape[1], num_kv_heads, head_dim),
        )
        self._kernels.write_tokens(addressof(args))
        if batch.num_decode_rows:
            self._decode(args, batch.num_decode_rows)
        if len(context_lens) > batch.num_decode_rows:
            self._prefill(args, batch.num_decode_rows, len(context_lens))
        return out_THD

    def _decode(self, args: AttentionArgs, num_rows: int) -> None:
        def work(first: int, last: int) -> None:
            self._kernels.attend_decode(addressof(args), first, last)

        self._kernels.split(num_rows, work, _MIN_ROWS_PER_THREAD)

    def _prefill(self, args: AttentionArgs, first_row: int, end_row: int) -> None:
        """One item of work per row and KV head."""
        offset = first_row * args.kv_heads

        def work(first: int, last: int) -> None:
            scratch = torch.empty(self._kernels.prefill_scratch_bytes(), dtype=torch.uint8)
            self._kernels.attend_prefill(
                addressof(args), scratch.data_ptr(), offset + first, offset + last
            )

        self._kernels.split((end_row - first_row) * args.kv_heads, work)


def _is_supported(cache: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> bool:
    """Float32 heads of a multiple of 16."""
    head_dim = cache.shape[-1]
    return (
        cache.dtype == torch.float32
        and head_dim % 16 == 0
        and head_dim <= _MAX_HEAD_DIM
        and _has_heads_of(q_THD, head_dim)
        and _has_heads_of(k_TGD, head_dim)
        and _has_heads_of(v_TGD, head_dim)
    )


def _has_heads_of(x_THD: Tensor, head_dim: int) -> bool:
    """Float32, and gaps at most between tokens."""
    _, head_stride, stride = x_THD.stride()
    return x_THD.dtype == torch.float32 and stride == 1 and head_stride == head_dim
