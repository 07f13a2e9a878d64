"""BatchBuilder: keeps the rows' block tables and sampling parameters as arrays, and turns a
StepPlan into the inputs of one step.

Shape letters: T tokens, R compute rows, L logit rows, S sample rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.backends.forward_batch import MODE_CODES
from rollout.backends.step_tensors import HostArray, SamplingFlags, StepInputs
from rollout.runner.logits_builder import LogitsBuilder
from rollout.step.plan import StepPlan
from rollout.step.seeds import uniforms

_SEED_MASK = (1 << 64) - 1


class BatchBuilder:
    """The only writer of the step's input arrays. Row 0 is scratch."""

    def __init__(self, *, num_rows: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_rows = num_rows + 1
        self._tables = np.zeros((self.num_rows, max_blocks), dtype=np.int32)
        self._seeds = np.zeros(self.num_rows, dtype=np.uint64)
        self._temperature = np.zeros(self.num_rows, dtype=np.float32)
        self._top_k = np.zeros(self.num_rows, dtype=np.int64)
        self._top_p = np.zeros(self.num_rows, dtype=np.float32)
        self._min_p = np.zeros(self.num_rows, dtype=np.float32)
        self._mode = np.zeros(self.num_rows, dtype=np.int8)
        self._wants_logprobs = np.zeros(self.num_rows, dtype=np.bool_)
        self._wants_ranks = np.zeros(self.num_rows, dtype=np.bool_)
        self._top_n = np.zeros(self.num_rows, dtype=np.int64)
        self._logits = LogitsBuilder(self.num_rows)

    def build(self, plan: StepPlan) -> StepInputs[HostArray]:
        """Apply the plan's changes to rows and block tables, and return the inputs of its step.

        The arrays belong to the step: the next plan may be built while it runs.
        """
        self._apply_changes(plan)
        return StepInputs(
            **self._tokens(plan),
            **self._draws(plan),
            score_targets_P=plan.score_targets.astype(np.int64),
            num_decode_rows=plan.num_decode_rows,
            score_top_n=plan.score_top_n,
            score_ranks=plan.score_ranks,
        )

    def _apply_changes(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            row, params = new.row, new.sampling_params
            wants_logprobs = params.return_log_probs or params.top_n_logprobs > 0
            self._seeds[row] = new.seed & _SEED_MASK
            self._temperature[row] = params.temperature
            self._top_k[row] = params.top_k
            self._top_p[row] = params.top_p
            self._min_p[row] = params.min_p
            self._mode[row] = MODE_CODES[params.logprobs_mode if wants_logprobs else "raw"]
            self._wants_logprobs[row] = wants_logprobs
            self._wants_ranks[row] = params.return_ranks
            self._top_n[row] = params.top_n_logprobs
            self._logits.set_row(new)
        self._tables[plan.table_rows, plan.table_indices] = plan.table_blocks

    def _tokens(self, plan: StepPlan) -> dict[str, Any]:
        """The step's tokens, and where their KV goes."""
        num_decode_rows = plan.num_decode_rows
        query_starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        np.cumsum(plan.query_lens, out=query_starts[1:])
        row_of_token = np.repeat(np.arange(len(plan.rows)), plan.query_lens)
        num_tokens = len(row_of_token)
        first_positions = plan.context_lens - plan.query_lens
        offsets = np.arange(num_tokens) - query_starts[row_of_token]
        positions = first_positions[row_of_token] + offsets
        num_blocks = -(-int(plan.context_lens.max()) // self.block_size)
        tables = self._tables[plan.rows, :num_blocks]
        blocks = tables[row_of_token, positions // self.block_size].astype(np.int64)
        input_rows = np.zeros(num_tokens, dtype=np.int64)
        input_rows[:num_decode_rows] = plan.rows[:num_decode_rows]
        token_ids = np.zeros(num_tokens, dtype=np.int64)
        token_ids[num_decode_rows:] = plan.prefill_token_ids
        return {
            "input_rows_T": input_rows,
            "token_ids_T": token_ids,
            "positions_T": positions,
            "slots_T": blocks * self.block_size + positions % self.block_size,
            "block_tables_RM": tables,
            "query_starts_E": query_starts,
            "context_lens_R": plan.context_lens,
        }

    def _draws(self, plan: StepPlan) -> dict[str, Any]:
        """The step's draws. Their random numbers depend on seed and position alone.

        Except where a group forks, each logit row is drawn from once, in order.
        """
        rows = plan.sample_rows
        sources, draws = _distinct(plan.sample_sources)
        temperature, top_k = self._temperature[rows], self._top_k[rows]
        top_p, min_p = self._top_p[rows], self._min_p[rows]
        truncates = (top_k > 0) | ((top_p > 0) & (top_p < 1)) | (min_p > 0)
        flags = SamplingFlags(
            all_greedy=bool((temperature == 0).all()),
            any_greedy=bool((temperature == 0).any()),
            any_truncation=bool((truncates & (temperature > 0)).any()),
            any_logprobs=bool(self._wants_logprobs[rows].any()),
            any_ranks=bool(self._wants_ranks[rows].any()),
            top_n=int(self._top_n[rows].max(initial=0)),
        )
        mode, processing = self._mode[rows], None
        if self._logits.rows:
            processing = self._logits.build(plan, mode, temperature)
        return {
            "logit_indices_L": np.concatenate([sources, plan.score_sources], dtype=np.int64),
            "draws_S": draws,
            "sample_rows_S": rows.astype(np.int64),
            "uniforms_S": uniforms(self._seeds[rows], plan.sample_positions),
            "temperature_S": temperature,
            "top_k_S": top_k,
            "top_p_S": top_p,
            "min_p_S": min_p,
            "mode_S": mode,
            "processing": processing,
            "num_drawn_logits": len(sources),
            "draws_in_order": len(sources) == len(draws),
            "flags": flags,
        }


def _distinct(sources_S: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the distinct sources, which come in rising order, and which one each sample has."""
    is_new_S = np.diff(sources_S, prepend=-1) > 0
    return sources_S[is_new_S], np.cumsum(is_new_S, dtype=np.int64) - 1
