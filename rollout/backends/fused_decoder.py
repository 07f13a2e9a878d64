"""FusedDecoder: the protocol of a decoder's forward pass as one native call.

`rollout.models.decoder` collects the weights in DecoderParts, `Backend.fuse_decoder` creates a
FusedDecoder from them, and `rollout.models.causal_lm` runs it. Only `rollout.backends.cpu.decoder`
implements it.

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
    """Weights of a layer: attention and a gated MLP, each a residual branch.

    `attention_norms_E` and `mlp_norms_E` have the norm weights before and after the branch.
    `head_norms` has the norm weights of query heads and of key heads. A missing norm is None.
    `has_whole_norms` says whether query and key norms span all heads. `rope` is the index of the
    layer's rotary table; None without a rope. `order_D` is the order of a head's dims that the
    table needs; None if the dims have that order. `is_parallel` says whether attention and MLP read
    the same input. `qkv`, `output`, `gate_up` and `down` are handles of `Ops.prepare_linear`.
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
    """This rank's share of a decoder under tensor parallelism.

    The rank has the embedding rows of `num_ids` token ids, from `first_id` on. `q_size` and
    `k_size` are the dims of all query heads and of all key heads, over all ranks. `counts_k` is
    False if a lower rank has the same key heads.
    """

    collectives: Collectives
    first_id: int
    num_ids: int
    q_size: int
    k_size: int
    counts_k: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """All weights and constants of a decoder whose layers are attention and a gated MLP.

    `embedding` is [V, E], or the memory of a repacked weight. `norm_offset` is added to the weights
    of all norms. Queries are multiplied by 1 + query_growth ln(1 + floor(position /
    growth_positions)). `share` is None if this process has the whole decoder.
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
    share: DecoderShare | None


class FusedDecoder(Protocol):
    """A decoder's forward pass as one native call. `handles` has the handles of all layers' matrix
    products. `handles` is empty if the fused pass can never run. The pass runs only if all handles
    use the same product, which the pass must support."""

    handles: Sequence[Any]

    def run(self, tables: Sequence[tuple[Tensor, Tensor]], batch: ForwardBatch) -> Tensor | None:
        """Return the hidden states of tokens `batch.logit_indices_L` after the final norm, [L, E].
        Writes the KV cache. `tables` has (cos_PD, sin_PD) of each rope. Returns None, and does
        nothing, if the layers must run one by one."""
        ...

    def explain(self) -> str:
        """Describe for a log which numbers of rows `run` supports, and why it refuses other
        numbers."""
        ...
