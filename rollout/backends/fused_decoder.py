"""FusedDecoder: the protocol of a decoder's forward pass as one call of the device, and its inputs.

`Decoder.parts` collects the inputs; `Backend.fuse_decoder` makes the FusedDecoder, which
`CausalLM.forward` runs. Only the CPU backend has one (cpu/decoder.py).

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

    The last four fields are handles of `Ops.prepare_linear`. Norm weights come in pairs: before and
    after attention, before and after the MLP, and of query and key heads. `has_whole_norms`: query
    and key norms span all heads. `rope`: index of the layer's rotary table. `order_D`: the order of
    a head's dims that the table needs. `is_parallel`: attention and MLP read the same input.
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

    Its embedding has the rows of ids [first_id, first_id + num_ids). Norms over all heads span
    `q_size` dims of queries and `k_size` dims of keys, over all ranks. `counts_k`: False if a lower
    rank has the same key heads.
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
    """A decoder's forward pass as one call of the device.

    `handles`: the handles of all its layers' products; empty if it can never run. A pass can run
    only if all of them use one product that the fused pass supports.
    """

    handles: Sequence[Any]

    def run(self, tables: Sequence[tuple[Tensor, Tensor]], batch: ForwardBatch) -> Tensor | None:
        """Return final-normed hidden states of `batch.logit_indices_L`, [L, E]. Writes the KV
        cache.

        `tables`: (cos_PD, sin_PD) of each rope. Returns None without doing anything if the layers
        must run one by one.
        """
        ...

    def explain(self) -> str:
        """Describe which numbers of rows `run` supports, and why not the others, for a log."""
        ...
