"""ForwardBatch and SamplingBatch: the device tensors of one forward pass, and of its draws.
Rotation and AttentionTraits: how a layer's attention differs from plain attention.

`rollout.worker.model_runner` creates the batches from a step's inputs, and the attention layers
create rotations and traits. `rollout.models`, `rollout.layers`, the backends and benchmarks read
them. Immutable, except for the tensors `kv` and `routing_TLK`, which layers write.

Shape letters: T tokens, R compute rows, M blocks per table, L logit rows, S sample rows, D head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of R rows to compute. Decode rows, of one token each, come first.

    Row r has the tokens [query_starts[r], query_starts[r + 1]). Its last token is at position
    context_lens[r] - 1. `kv[layer]` is the layer's cache tensor, in the attention backend's layout.
    Mixtures of experts write each token's experts to `routing_TLK`, unless it is None.
    """

    token_ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    slots_T: Tensor  # int64: block * block_size + offset where the token's K and V are written
    block_tables_RM: Tensor  # int32
    query_starts_E: Tensor  # int32, E = R + 1: `query_starts` on the device
    context_lens_R: Tensor  # int32: `context_lens` on the device
    query_starts: NDArray[np.int32]  # host, [R + 1]
    context_lens: NDArray[np.int32]  # host, [R]
    num_decode_rows: int
    block_size: int
    logit_indices_L: Tensor  # int64: indices of the tokens whose logits are needed
    kv: Sequence[Tensor]
    plan: Any = None  # set by `AttentionBackend.begin`, read by its `attend`
    routing_TLK: Tensor | None = None  # int16: [tokens, layers with experts, experts of a token]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])


# Which numbers of the rotary embedding are rounded to the heads' dtype. "once": only the result.
# "angles": the result, cosines and sines. "each": these, each product and each sum.
RotaryRounding: TypeAlias = Literal["once", "angles", "each"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of query and key heads. If there are norm weights, each head is RMS-normed
    first (Qwen3). Cosines and sines are per token, float32, and span all D dims.
    `rounds_norm_first` rounds normed heads to their dtype before the product with the weights."""

    cos_TD: Tensor
    sin_TD: Tensor
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 0.0
    rounds_norm_first: bool = False
    rounding: RotaryRounding = "once"


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """Differences of a layer's attention from softmax(q k / sqrt(D)) over the whole context. A
    field that is None makes no difference.

    `scale` replaces 1 / sqrt(D). `window` is the number of positions that a token sees, its own
    included. `softcap` c changes a score to c tanh(score / c). `sinks_H` has a learned score per
    query head that takes part in the softmax but has no value, as in GPT-OSS. Sources: Gemma 2's
    report, sec. 2; Xiao et al. 2023, "StreamingLLM".
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def has_plain_scores(self) -> bool:
        """Whether attention is plain softmax over the whole context, with any scale."""
        return self.window is None and self.softcap is None and self.sinks_H is None

    def scale_of(self, head_dim: int) -> float:
        """Return the factor of scores: `scale`, or 1 / sqrt(head_dim) if `scale` is None."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = AttentionTraits()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of S draws, in contiguous tensors.

    `mode_S` says which log-probs to report, by MODE_CODES. A row with temperature 0 is greedy and
    reports raw log-probs. The flags are known on the host and let samplers skip passes. `top_n` is
    the largest top-n of the draws; 0 if no draw reports one.
    """

    uniforms_S: Tensor  # float64 in [0, 1)
    temperature_S: Tensor  # float32
    top_k_S: Tensor  # int64, 0 = off
    top_p_S: Tensor  # float32, 0 = off
    min_p_S: Tensor  # float32, 0 = off
    mode_S: Tensor  # int8
    all_greedy: bool
    any_greedy: bool
    any_truncation: bool
    any_logprobs: bool
    top_n: int

    def select(self, samples_K: Tensor | slice) -> SamplingBatch:
        """Return the batch of the draws `samples_K`, their indices or a range. The flags still
        describe all draws."""
        return replace(
            self,
            uniforms_S=self.uniforms_S[samples_K],
            temperature_S=self.temperature_S[samples_K],
            top_k_S=self.top_k_S[samples_K],
            top_p_S=self.top_p_S[samples_K],
            min_p_S=self.min_p_S[samples_K],
            mode_S=self.mode_S[samples_K],
        )


MODE_CODES = {"raw": 0, "temperature": 1, "processed": 2}
