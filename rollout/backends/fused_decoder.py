"""A decoder's forward pass as one operation of the device: what it is made of, and what it can do.

Shape letters: V vocabulary, E hidden size, D head dim, P positions, L kept tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rollout.backends.forward_batch import AttentionTraits, ForwardBatch
from rollout.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerParts:
    """Attention and a gated MLP, each a residual branch; products are handles of
    `Ops.prepare_linear`.

    Weights of norms: before and after each mixer, and of query and key, which are over all heads
    together if `has_whole_norms`. `rope` is the index of the layer's rotary table; `order_D` the
    order of dims that it wants. `is_parallel`: the MLP reads what attention has read.
    """

    attention_norms_E: tuple[Tensor | None, Tensor | None]
    mlp_norms_E: tuple[Tensor | None, Tensor | None]
    head_norms: tuple[Tensor | None, Tensor | None]
    has_whole_norms: bool
    rope: int | None
    order_D: Tensor | None
    traits: AttentionTraits
    is_parallel: bool
    qkv: Any
    output: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShare:
    """What a rank of a group has of a decoder, beside its heads and its columns of MLPs.

    The embedding has the rows of ids [first_id, first_id + num_ids). Norms over all heads are over
    `q_size` dims of queries and `k_size` of keys; `counts_k` is False where a rank before this one
    has the same keys.
    """

    collectives: Collectives
    first_id: int
    num_ids: int
    q_size: int
    k_size: int
    counts_k: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """All that a decoder of attention and gated MLPs computes with.

    `embedding` is [V, E], or a repacked weight's memory. `norm_offset` is added to the weights of
    all norms. Queries grow by 1 + query_growth ln(1 + floor(position / growth_positions)).
    """

    embedding: Tensor
    layers: Sequence[DecoderLayerParts]
    final_norm_E: Tensor
    is_layer_norm: bool
    norm_offset: float
    is_gelu: bool
    embedding_multiplier: float
    residual_multiplier: float
    query_growth: float
    growth_positions: int
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    share: DecoderShare | None  # None: this process has all of it


class FusedDecoder(Protocol):
    """A decoder's forward pass as one operation of the device.

    It runs passes for which all `handles` have one product of its own. `handles` are those of its
    layers, each as often as a pass uses it; there are none if it can never run.
    """

    handles: Sequence[Any]

    def run(self, tables: Sequence[tuple[Tensor, Tensor]], batch: ForwardBatch) -> Tensor | None:
        """Final-normed hidden states of `batch.logit_indices_L`, [L, E]; writes the KV cache.

        `tables` are (cos_PD, sin_PD) of each rope. Returns None, and has done nothing, where the
        layers must run one by one.
        """
        ...

    def explain(self) -> str:
        """The numbers of rows that `run` serves, and why no others, for people."""
        ...
