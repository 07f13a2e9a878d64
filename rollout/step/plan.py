"""StepPlan: the tokens of one forward pass, as arrays of integers.

`rollout.scheduling` creates it. StepPipeline launches it on an executor, which passes it to the
Worker of every rank. BatchBuilder, LogitsBuilder and ModelRunner of `rollout.worker` read it.

A *row* is a slot that a request keeps while it runs; row 0 is scratch. A *compute row* is a row
with tokens in this step. A *sample row* is a row for which this step samples a token. When a group
forks, several sample rows take the logits of one compute row.

The executor keeps each row's block table and sampling parameters, so a plan holds only changes of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.sampling_params import SamplingParams

IntArray = NDArray[np.int32]

EMPTY: IntArray = np.empty(0, dtype=np.int32)


def _empty() -> IntArray:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """The request that now occupies a row, and how its tokens are sampled.

    end_ids: token ids that end the request. They are not sampled within the first `min_tokens`
        generated tokens.
    token_ids: all tokens of the request so far if its sampling parameters have penalties, else
        empty.
    """

    row: int
    sampling_params: SamplingParams
    seed: int
    num_prompt: int
    end_ids: tuple[int, ...] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One forward pass.

    The step has R compute rows, S sample rows, C changes of block tables, K block copies and P
    scored tokens. Its tokens are the compute rows' tokens, concatenated in order. Decode rows come
    first, with one token each. Their token ids are not in the plan, because the last sampled tokens
    are already on the device.

    rows: [R] the compute rows.
    query_lens: [R] the number of tokens that each row computes in this step.
    context_lens: [R] the length of each row's KV after the step.
    prefill_token_ids: token ids of all compute rows after the decode rows.
    table_rows, table_indices, table_blocks: [C] the row whose block table changes, the index of the
        entry, and the new block.
    copy_sources, copy_targets, copy_lengths: [K] source block and target block of each copy before
        the forward pass, and how many tokens to copy from the start of the block. No block is both
        a source and a target.
    sample_sources, sample_rows, sample_positions: [S] index of the token whose logits are sampled,
        the row that gets the sampled token, and its position in that row.
    score_sources, score_targets: [P] index of the token whose logits score a prompt token, and the
        prompt token's id.
    score_top_n: number of most likely tokens reported with each scored token.
    score_ranks: whether the rank of each scored token is reported.
    """

    step_id: int
    weights_version: int
    num_decode_rows: int = 0
    rows: IntArray = field(default_factory=_empty)
    query_lens: IntArray = field(default_factory=_empty)
    context_lens: IntArray = field(default_factory=_empty)
    prefill_token_ids: IntArray = field(default_factory=_empty)
    new_rows: tuple[NewRow, ...] = ()
    table_rows: IntArray = field(default_factory=_empty)
    table_indices: IntArray = field(default_factory=_empty)
    table_blocks: IntArray = field(default_factory=_empty)
    copy_sources: IntArray = field(default_factory=_empty)
    copy_targets: IntArray = field(default_factory=_empty)
    copy_lengths: IntArray = field(default_factory=_empty)
    sample_sources: IntArray = field(default_factory=_empty)
    sample_rows: IntArray = field(default_factory=_empty)
    sample_positions: IntArray = field(default_factory=_empty)
    score_sources: IntArray = field(default_factory=_empty)
    score_targets: IntArray = field(default_factory=_empty)
    score_top_n: int = 0
    score_ranks: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return self.num_decode_rows + len(self.prefill_token_ids)
