"""A backend of plain torch expressions, so that models are tested without paging or packing.

Each sequence owns one whole cache block, and attention is a dense loop over sequences. Shape
letters as in rollout/backends/base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.backends.base import Backend
from rollout.backends.forward_batch import (
    AttentionTraits,
    ForwardBatch,
    RotaryRounding,
    Rotation,
)
from rollout.models import CausalLM

BLOCK_SIZE = 128


@dataclass
class PackedLinear:
    """A handle that owns copies, so that a forgotten `refresh` shows."""

    weight: Tensor
    bias: Tensor | None
    packed: tuple[Tensor, Tensor | None]


class OracleOps:
    """The arithmetic half of Ops; sampling is no concern of a model."""

    rounds_like_trainers = False

    def prepare_linear(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, may_repack: bool = False
    ) -> PackedLinear:
        handle = PackedLinear(weight_NK, bias_N, (weight_NK, bias_N))
        self.refresh(handle)
        return handle

    def choose_products(
        self,
        handles: Iterable[PackedLinear],
        experts: Iterable[Any] = (),
        fused: Any = None,
    ) -> None:
        pass

    def stage(
        self, handle: PackedLinear, parts: Sequence[Tensor], allocate: Callable[[int], Tensor]
    ) -> Tensor:
        return torch.cat(list(parts))

    def refresh(self, handle: PackedLinear, staged: Tensor | None = None) -> None:
        bias = None if handle.bias is None else handle.bias.clone()
        handle.packed = (handle.weight.clone() if staged is None else staged, bias)

    def repacked(self, handle: PackedLinear) -> None:
        return None

    def release(self, handle: PackedLinear) -> None:
        handle.packed = (torch.empty(0), None)

    def linear(self, x_TK: Tensor, handle: PackedLinear) -> Tensor:
        return torch.nn.functional.linear(x_TK, *handle.packed)

    def linear_float32(self, x_TK: Tensor, handle: PackedLinear) -> Tensor:
        return self.linear(x_TK, handle).float()

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, rounds_first: bool = False
    ) -> Tensor:
        x32 = x.float()
        return (x32 / (x32.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        rounds_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        rounding: RotaryRounding = "once",
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_TD[:, None], sin_TD[:, None]

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

        return turn(q_THD), turn(k_TGD)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (centred * scale * weight.float()).to(x.dtype)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + inner.tanh()) * up

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up


class OracleAttention:
    """Dense causal attention, one sequence at a time; a layer's cache is [slots, 2, G, D]."""

    def begin(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        layer: int,
        batch: ForwardBatch,
        rotation: Rotation | None,
        traits: AttentionTraits,
    ) -> Tensor:
        ops = OracleOps()
        if rotation is not None:
            if rotation.q_norm_D is not None and rotation.k_norm_D is not None:
                q_THD = ops.rms_norm(q_THD, rotation.q_norm_D, rotation.eps)
                k_TGD = ops.rms_norm(k_TGD, rotation.k_norm_D, rotation.eps)
            q_THD, k_TGD = ops.rotary(q_THD, k_TGD, rotation.cos_TD, rotation.sin_TD)
        cache = batch.kv[layer]
        cache[batch.slots_T] = torch.stack((k_TGD, v_TGD), dim=1)
        group_size = q_THD.shape[1] // k_TGD.shape[1]
        outputs = []
        for row, context_len in enumerate(batch.context_lens.tolist()):
            start, end = batch.query_starts[row : row + 2].tolist()
            first_slot = int(batch.block_tables_RM[row, 0]) * batch.block_size
            context = cache[first_slot : first_slot + context_len]
            k, v = context.repeat_interleave(group_size, dim=2).unbind(1)
            scores = torch.einsum("thd,shd->hts", q_THD[start:end], k)
            scores = scores * traits.scale_of(q_THD.shape[-1])
            if traits.softcap is not None:
                scores = traits.softcap * (scores / traits.softcap).tanh()
            age = batch.positions_T[start:end, None] - torch.arange(context_len)
            is_hidden = (age < 0) | (age >= (traits.window or BLOCK_SIZE))
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hts,shd->thd", weights, v))
        return torch.cat(outputs)


def oracle_backend() -> Backend:
    """A Backend whose unused parts are absent."""
    unused: Any = None
    ops: Any = OracleOps()
    attention: Any = OracleAttention()
    return Backend(
        device=torch.device("cpu"),
        memory_bytes=0,
        ops=ops,
        attention=attention,
        executor=unused,
        memory=unused,
        create_host_arena=unused,
    )


def make_cache(model: CausalLM, num_sequences: int) -> list[Tensor]:
    """Empty cache tensors, one per layer, with room for that many sequences."""
    spec = model.cache_spec(BLOCK_SIZE)
    shape = (num_sequences * spec.block_size, 2, spec.num_kv_heads, spec.head_dim)
    return [torch.zeros(shape, dtype=spec.dtype) for _ in range(spec.num_layers)]


def make_batch(
    kv: Sequence[Tensor],
    chunks: Sequence[tuple[int, Sequence[int]]],
    wanted: Sequence[int] | None = None,
) -> ForwardBatch:
    """One forward pass; chunk r is (start position, token ids) of sequence r. None wants all."""
    lens = [len(token_ids) for _, token_ids in chunks]
    positions = [range(start, start + n) for (start, _), n in zip(chunks, lens, strict=True)]
    slots = [row * BLOCK_SIZE + p for row, owned in enumerate(positions) for p in owned]
    query_starts = np.cumsum([0, *lens], dtype=np.int32)
    context_lens = np.array([p.stop for p in positions], dtype=np.int32)
    return ForwardBatch(
        token_ids_T=torch.tensor([token_id for _, token_ids in chunks for token_id in token_ids]),
        positions_T=torch.tensor([p for owned in positions for p in owned]),
        slots_T=torch.tensor(slots),
        block_tables_RM=torch.arange(len(chunks), dtype=torch.int32)[:, None],
        query_starts_E=torch.from_numpy(query_starts),
        context_lens_R=torch.from_numpy(context_lens),
        query_starts=query_starts,
        context_lens=context_lens,
        num_decode_rows=0,
        block_size=BLOCK_SIZE,
        logit_indices_L=torch.tensor(
            range(sum(lens)) if wanted is None else wanted, dtype=torch.int64
        ),
        kv=kv,
    )


def logits_of(model: CausalLM, token_ids: Sequence[int]) -> Tensor:
    """Logits of every token of one fresh sequence, [T, V]."""
    if not model.is_prepared:
        model.prepare(oracle_backend())
    batch = make_batch(make_cache(model, 1), [(0, token_ids)])
    return model.compute_logits(model(batch))
