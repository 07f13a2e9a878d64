"""StepInputs: the arrays that a step copies to its device; Program: what the device runs on them.

The worker builds them as host arrays; a `BackendExecutor` copies them and runs the program. Both
forms, host arrays and device tensors, have these types.

Shape letters: T tokens, R compute rows, E = R + 1, M blocks per table, L logit rows, S sample rows,
P scored tokens, N top-n; LogitsInputs has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.step.output import StepOutput

Array = TypeVar("Array")
HostArray: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """Facts about a step's draws that the host knows; they let samplers skip passes."""

    all_greedy: bool
    any_greedy: bool
    any_truncation: bool
    any_logprobs: bool
    any_ranks: bool
    top_n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsInputs(Generic[Array]):
    """Changes to the logits of K samples before these are drawn.

    Of the K samples Q have penalties, A have a list of allowed ids, and U report log-probs of the
    unchanged logits. `histories_Q` are indices of `TokenHistories`; `lengths_Q` counts a history's
    tokens before this draw, of which the first `num_prompt_Q` are the prompt. `new_*_N` are the N
    tokens of histories that begin with this step.
    """

    samples_K: Array  # which sample
    bias_at_B: Array  # index into K
    bias_ids_B: Array  # the biased id
    biases_B: Array  # float32: added to the id's logit; -inf forbids the id
    limited_A: Array  # index into K
    allowed_at_C: Array  # index into A
    allowed_ids_C: Array  # an id that the sample may draw
    penalized_Q: Array  # index into K
    penalties_Q3: Array  # float32: repetition, presence, frequency
    histories_Q: Array
    lengths_Q: Array
    num_prompt_Q: Array
    new_histories_N: Array
    new_positions_N: Array
    new_ids_N: Array  # int32
    unprocessed_U: Array  # index into K
    inverse_temperature_U: Array  # float32
    processed_R: Array  # index into K: the others, which report log-probs of changed logits


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout(Generic[Array]):
    """Which tokens a step computes, from which logits it draws, and how.

    While the same rows decode, their steps share one object, so that its copy can stay on the
    device. Decode rows come first. The first `num_drawn_logits` of the L logit rows are drawn from;
    the others are scored, in order. `asks_more_S`, on the host: the samples that want a top-n or
    ranks beside their log-prob.
    """

    input_rows_T: Array  # the row whose last token this is; 0 for one that token_ids_T names
    token_ids_T: Array
    query_starts_E: Array
    logit_indices_L: Array  # the token whose logits are wanted
    draws_S: Array  # the logit row each sample is drawn from
    sample_rows_S: Array  # the row that gets the token
    temperature_S: Array
    top_k_S: Array
    top_p_S: Array
    min_p_S: Array
    mode_S: Array
    score_targets_P: Array
    num_decode_rows: int
    num_drawn_logits: int
    only_decodes: bool  # each token is the last one of its row
    draws_in_order: bool  # sample i is drawn from logit row i
    flags: SamplingFlags
    score_top_n: int
    score_ranks: bool
    asks_more_S: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(Generic[Array]):
    """One step: which tokens to compute, where to write their KV, what to draw and to score.

    `processing`: None if no sample's logits are changed before the draw.
    """

    layout: StepLayout[Array]
    positions_T: Array
    slots_T: Array
    block_tables_RM: Array
    context_lens_R: Array
    uniforms_S: Array
    processing: LogitsInputs[Array] | None = None


# Dtypes of the arrays of StepLayout, and of the other arrays of StepInputs; all are contiguous.
LAYOUT_TYPES = {
    "input_rows_T": "int64",
    "token_ids_T": "int64",
    "query_starts_E": "int32",
    "logit_indices_L": "int64",
    "draws_S": "int64",
    "sample_rows_S": "int64",
    "temperature_S": "float32",
    "top_k_S": "int64",
    "top_p_S": "float32",
    "min_p_S": "float32",
    "mode_S": "int8",
    "score_targets_P": "int64",
}
INPUT_TYPES = {
    "positions_T": "int64",
    "slots_T": "int64",
    "block_tables_RM": "int32",
    "context_lens_R": "int32",
    "uniforms_S": "float64",
}


class Program(Protocol):
    """The computation of a step on its device, in two parts.

    Both take the same step as host arrays and as device tensors. A call may be captured in a graph
    and replayed for other values: only shapes and flags may decide what it launches.
    """

    def forward(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states of the L logit rows, [L, E], and the tokens' experts if recorded."""
        ...

    def draw(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor], hidden_LE: Tensor
    ) -> StepOutput[Tensor]:
        """Draw samples from the first rows of `hidden_LE`, and score the others."""
        ...


Fetch: TypeAlias = Callable[[], StepOutput]
