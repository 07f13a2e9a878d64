"""Attention of few new tokens behind long cached contexts, beside what physics allows.

One layer by itself: in a step of a whole model its products would hide it. Shape letters: T tokens,
R rows, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_device import MeasuredDevice
from benchmarks.gpu_floors import Floors
from benchmarks.gpu_shapes import BLOCK_TOKENS, kv_bytes_per_token
from rollout import InferenceConfig
from rollout.backends.base import AttentionBackend, CacheSpec
from rollout.backends.forward_batch import ForwardBatch
from rollout.backends.select import create_backend
from rollout.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSizes:
    """`batch` rows with `num_new` tokens each behind `num_cached`, as a turn of a conversation."""

    batch: int
    num_cached: int
    num_new: int
    num_calls: int

    @property
    def pairs(self) -> int:
        """Positions that all new tokens see."""
        return self.batch * (
            self.num_new * self.num_cached + self.num_new * (self.num_new + 1) // 2
        )


def turn_batch(
    attention: AttentionBackend, spec: ModelSpec, sizes: TurnSizes, device: str
) -> ForwardBatch:
    """Rows with blocks of their own, of a cache that holds random numbers."""
    context_len = sizes.num_cached + sizes.num_new
    blocks_per_row = -(-context_len // BLOCK_TOKENS)
    cache_spec = CacheSpec(
        num_layers=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        block_size=BLOCK_TOKENS,
    )
    shape = attention.cache_shape(cache_spec, sizes.batch * blocks_per_row)
    tables = np.arange(sizes.batch * blocks_per_row, dtype=np.int32).reshape(sizes.batch, -1)
    positions = np.arange(sizes.num_cached, context_len)
    slots = tables[:, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    starts = np.array([*accumulate([sizes.num_new] * sizes.batch, initial=0)], dtype=np.int32)
    context_lens = np.full(sizes.batch, context_len, dtype=np.int32)

    def on_device(values: Any) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device)

    return ForwardBatch(
        token_ids_T=torch.zeros(sizes.batch * sizes.num_new, dtype=torch.int64, device=device),
        positions_T=on_device(np.tile(positions, sizes.batch)),
        slots_T=on_device(slots.astype(np.int64).reshape(-1)),
        block_tables_RM=on_device(tables),
        query_starts_E=on_device(starts),
        context_lens_R=on_device(context_lens),
        query_starts=starts,
        context_lens=context_lens,
        num_decode_rows=0,
        block_size=BLOCK_TOKENS,
        logit_indices_L=torch.zeros(0, dtype=torch.int64, device=device),
        kv=[torch.randn(shape, device=device).to(spec.dtype)],
    )


def measure_turn(
    device: MeasuredDevice, spec: ModelSpec, floors: Floors | None, sizes: TurnSizes
) -> dict[str, Any]:
    """Seconds of one layer's attention, called back to back, beside the time that the memory takes
    to deliver the contexts' K and V once, and beside the products of its scores and values. The
    floor is the longer of these.
    """
    attention = create_backend(InferenceConfig(device=device.name, memory_kind="device")).attention
    batch = attention.begin(turn_batch(attention, spec, sizes, device.name))
    q_THD, k_TGD, v_TGD = (
        torch.randn(sizes.batch * sizes.num_new, num_heads, spec.head_dim, device=device.name).to(
            spec.dtype
        )
        for num_heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    seconds = device.seconds_per_call(
        lambda: attention.attend(q_THD, k_TGD, v_TGD, 0, batch), sizes.num_calls
    )
    num_bytes = kv_bytes_per_token(spec) // spec.num_layers * sizes.batch
    num_bytes *= sizes.num_cached + sizes.num_new
    flops = 4 * spec.num_heads * spec.head_dim * sizes.pairs
    memory_s = None if floors is None else num_bytes / floors.memory_bytes_per_s
    products_s = None if floors is None else flops / floors.matmul_flops_per_s
    floor_s = None if memory_s is None or products_s is None else max(memory_s, products_s)
    return {
        "batch": sizes.batch,
        "num_cached": sizes.num_cached,
        "num_new": sizes.num_new,
        "attention_s": seconds,
        "kv_bytes": num_bytes,
        "flops": flops,
        "memory_floor_s": memory_s,
        "products_floor_s": products_s,
        "share_of_floor": None if floor_s is None else floor_s / seconds,
    }
