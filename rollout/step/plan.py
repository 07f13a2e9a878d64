"""StepPlan: which tokens run in one forward pass, as arrays of integers.

A *row* is a slot that a request keeps for as long as it runs; row 0 is scratch. A *compute row* is
a row that has tokens in this step. A *sample row* is a row that draws a token from the logits of
some computed token. They differ: all children of a fork are sampled from one compute row. A row's
block table and its sampling parameters last, so that a plan holds only what changes of them.
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
    """A row that a request has taken, and how its tokens are drawn.

    The first `num_prompt` tokens of the request are its prompt. `end_ids` are the ids that end it,
    which are not drawn within its first `min_tokens` generated tokens. `token_ids` are all tokens
    that it has so far where its sampling parameters have penalties, and else empty.
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

    rows, query_lens, context_lens: [R] the compute rows, how many tokens each computes in this
        step, and how long its KV is afterwards.
    prefill_token_ids: ids of the tokens of all rows that do not decode.
    table_rows, table_indices, table_blocks: [C] the row whose block table changes, the index of the
        entry, and its new block.
    copy_sources, copy_targets, copy_lengths: [K] blocks that are copied before the forward pass,
        and how many of their first tokens. No block is both a source and a target.
    sample_sources, sample_rows, sample_positions: [S] the token of this step whose logits are drawn
        from, the row that gets the drawn token, and the absolute position of that.
    score_sources, score_targets: [P] the token of this step whose logits score a prompt token, and
        the id of that.
    score_top_n, score_ranks: how many of the best tokens are reported with each, and whether ranks
        are.
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
        """Tokens that the step computes."""
        return self.num_decode_rows + len(self.prefill_token_ids)
