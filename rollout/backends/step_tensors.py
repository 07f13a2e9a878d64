"""StepInputs: what a step brings to its device.

Both exist as host arrays and as device tensors. Shape letters: T tokens, R compute rows, E = R + 1,
M blocks per table, L logit rows, S sample rows, P scored tokens, N top-n. Those of LogitsInputs are
explained there.
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
    """What the host knows of a step's draws; it spares passes over the logits."""

    all_greedy: bool
    any_greedy: bool
    any_truncation: bool
    any_logprobs: bool
    any_ranks: bool
    top_n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsInputs(Generic[Array]):
    """What is done to the logits of K samples before those are drawn. Of them Q have penalties, A
    a list of allowed ids, and U report log-probs of the logits as they were.

    Histories (`TokenHistories`) are numbered from 0 on; `lengths_Q` counts their tokens
    before this draw, of which the first `num_prompt_Q` are the prompt. N tokens are known of
    histories that begin.
    """

    samples_K: Array  # which sample
    bias_at_B: Array  # index into K ...
    bias_ids_B: Array  # ... an id ...
    biases_B: Array  # float32: ... and what is added to its logit; -inf where it is forbidden
    limited_A: Array  # index into K
    allowed_at_C: Array  # index into A ...
    allowed_ids_C: Array  # ... and an id that it may draw
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
    processed_R: Array  # the others, which report log-probs of what they are drawn from


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout(Generic[Array]):
    """Which tokens a step computes, from which logits it draws, and how.

    While the same rows decode, all their steps have this same object, so that what a device has of
    it can stay there. Decode rows come first. The first `num_drawn_logits` of the L logit rows are
    drawn from, the others are scored, in order. `asks_more_S` stays on the host: the samples that
    want more than their log-prob, a top-n or ranks.
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
    """One step: what to compute, where to write it, what to draw and what to score.

    `processing` is None where all logits are drawn from as they are.
    """

    layout: StepLayout[Array]
    positions_T: Array
    slots_T: Array
    block_tables_RM: Array
    context_lens_R: Array
    uniforms_S: Array
    processing: LogitsInputs[Array] | None = None


# The arrays of StepLayout, and those of StepInputs beside it: all have these types, and none has
# gaps.
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
    """What a step does on its device, in two parts.

    Both take the same step as host arrays and as device tensors. They may run for the device what
    is then replayed for other values: only shapes and flags are known for sure.
    """

    def forward(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden states of the L logit rows [L, E], the experts of the tokens if recorded)."""
        ...

    def draw(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor], hidden_LE: Tensor
    ) -> StepOutput[Tensor]:
        """Draw the samples and score the others of these rows."""
        ...


Fetch: TypeAlias = Callable[[], StepOutput]
