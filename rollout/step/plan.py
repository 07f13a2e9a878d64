"""StepPlan: the tokens of one forward pass, as arrays of integers.

`rollout.scheduling` makes it. StepPipeline launches it on an executor, which gives the same plan to
the Worker of every rank. There BatchBuilder, LogitsBuilder and ModelRunner read it.

A *row* is a slot that a request keeps for as long as it runs; row 0 is scratch. A *compute row* is
a row that has tokens in this step. A *sample row* is a row for which this step draws a token. The
two differ when a group forks: the first tokens of all its requests are drawn from the logits of one
compute row. The executor keeps each row's block table and sampling parameters, so a plan holds only
their changes.
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

    num_prompt: number of prompt tokens. end_ids: token ids that end the request; they are not drawn
    within its first `min_tokens` generated tokens. token_ids: all tokens of the request so far if
    its sampling parameters have penalties, else empty.
    """

    row: int
    sampling_params: SamplingParams
    seed: int
    num_prompt: int
    end_ids: tuple[int, ...] = ()
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One forward pass over R compute rows, with S sample rows, C changes of block tables, K block
    copies and P scored tokens.

    The step's tokens are the tokens of its compute rows, concatenated in order: decode rows come
    first, with one token each. A decode row names no token: its last sampled token is already on
    the device.

    rows, query_lens, context_lens: [R] the compute rows, the number of tokens that each computes in
        this step, and the length of its KV afterwards.
    prefill_token_ids: token ids of all compute rows after the decode rows.
    table_rows, table_indices, table_blocks: [C] the row whose block table changes, the index of the
        entry, and its new block.
    copy_sources, copy_targets, copy_lengths: [K] source block and target block of each copy made
        before the forward pass, and how many of the block's first tokens to copy. No block is both
        a source and a target.
    sample_sources, sample_rows, sample_positions: [S] index of the step's token from whose logits a
        token is drawn, the row of the drawn token, and its absolute position in that row.
    score_sources, score_targets: [P] index of the step's token whose logits score a prompt token,
        and the prompt token's id.
    score_top_n, score_ranks: number of most likely tokens reported with each scored token, and
        whether its rank is reported.
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
