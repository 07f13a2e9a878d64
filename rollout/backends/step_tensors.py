"""StepInputs: the arrays that a step copies to its device; Program: what the device runs on them.

`rollout.worker.batch_builder` and `rollout.worker.logits_builder` create the host arrays. The
executors of the backends copy them to the device and run ModelRunner, the only Program. The classes
are generic in `Array`, for host arrays and for device tensors.

Shape letters: T tokens, R compute rows, E = R + 1, M blocks per table, L logit rows, S sample rows,
P scored tokens. LogitsInputs explains its own letters.
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
    """Flags of a step's draws, known on the host, by which samplers skip passes. `top_n` is the
    largest top-n of the draws; 0 if no draw reports one."""

    all_greedy: bool
    any_greedy: bool
    any_truncation: bool
    any_logprobs: bool
    any_ranks: bool
    top_n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsInputs(Generic[Array]):
    """Changes to the logits of K samples before they are drawn, with B biases and C allowed ids in
    all.

    Of the K samples Q have penalties, A have a list of allowed ids, U report log-probs of the
    unchanged logits, and R report log-probs of the changed logits. `histories_Q` has indices in
    `TokenHistories`. `lengths_Q` is the number of tokens of a history before this draw. The first
    `num_prompt_Q` of them are the prompt. `new_*_N` have the N tokens of histories that begin with
    this step.
    """

    samples_K: Array  # index of the sample in the step
    bias_at_B: Array  # index into K
    bias_ids_B: Array  # token id whose logit is biased
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
    processed_R: Array  # index into K


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout(Generic[Array]):
    """Which tokens a step computes, from which logits it draws, and how.

    While the same rows decode, their steps share one StepLayout, so that its copy can stay on the
    device. Decode rows come first. Of the L logit rows, the first `num_drawn_logits` are drawn
    from, and the remaining rows score prompt tokens, in order. `asks_more_S`, always on the host,
    says whether a sample reports a top-n or its rank.
    """

    input_rows_T: Array  # the row whose last token this is; 0 if token_ids_T has its id
    token_ids_T: Array
    query_starts_E: Array
    logit_indices_L: Array  # index of the token whose logits are needed
    draws_S: Array  # index of the logit row from which the sample is drawn
    sample_rows_S: Array  # the row whose next token is drawn
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
    `processing` has changes to logits before the draw; None if there are none."""

    layout: StepLayout[Array]
    positions_T: Array
    slots_T: Array
    block_tables_RM: Array
    context_lens_R: Array
    uniforms_S: Array
    processing: LogitsInputs[Array] | None = None


# Dtypes of the arrays of StepLayout and of StepInputs. All are contiguous.
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
    """The computation of a step on its device, in two parts. Both methods take the step's inputs as
    host arrays and as device tensors. A call can be captured in a graph and replayed with other
    values, so the launched kernels must depend only on shapes and flags."""

    def forward(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states of the L logit rows, [L, hidden size], and the tokens' experts. The
        second result is None if experts are not recorded."""
        ...

    def draw(
        self, host: StepInputs[HostArray], inputs: StepInputs[Tensor], hidden_LE: Tensor
    ) -> StepOutput[Tensor]:
        """Draw samples from the first `num_drawn_logits` rows of `hidden_LE`, and score prompt
        tokens by the remaining rows."""
        ...


Fetch: TypeAlias = Callable[[], StepOutput]
