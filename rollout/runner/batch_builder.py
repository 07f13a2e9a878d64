"""BatchBuilder: keeps the rows' block tables and sampling parameters as arrays, and turns a
StepPlan into the inputs of one step.

Shape letters: T tokens, R compute rows, L logit rows, S sample rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.backends.forward_batch import MODE_CODES
from rollout.backends.step_tensors import HostArray, SamplingFlags, StepInputs
from rollout.runner.logits_builder import LogitsBuilder
from rollout.step.plan import StepPlan
from rollout.step.seeds import uniforms

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnRows:
    """How the tokens of sample rows are drawn, which does not change while the rows stay the same.

    inputs: of StepInputs, by name. seeds: uint64 [S].
    """

    inputs: dict[str, Any]
    seeds: NDArray[np.uint64]


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
        self._drawn_rows: tuple[bytes, _DrawnRows] | None = None  # those of the latest step

    def build(self, plan: StepPlan) -> StepInputs[HostArray]:
        """Apply the plan's changes to rows and block tables, and return the inputs of its step.

        The next plan may be built while the step runs; nobody writes to the arrays.
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
        if plan.new_rows:
            self._drawn_rows = None
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
        rows = self._rows_to_draw(plan.sample_rows)
        sources, draws = _distinct(plan.sample_sources)
        processing = None
        if self._logits.rows:
            inputs = rows.inputs
            processing = self._logits.build(plan, inputs["mode_S"], inputs["temperature_S"])
        return {
            **rows.inputs,
            "logit_indices_L": np.concatenate([sources, plan.score_sources], dtype=np.int64),
            "draws_S": draws,
            "uniforms_S": uniforms(rows.seeds, plan.sample_positions),
            "processing": processing,
            "num_drawn_logits": len(sources),
            "draws_in_order": len(sources) == len(draws),
        }

    def _rows_to_draw(self, rows_S: NDArray[np.int32]) -> _DrawnRows:
        """Return how these rows are drawn: mostly the rows of the step before."""
        key = rows_S.tobytes()
        if self._drawn_rows is None or self._drawn_rows[0] != key:
            self._drawn_rows = key, self._gather(rows_S)
        return self._drawn_rows[1]

    def _gather(self, rows_S: NDArray[np.int32]) -> _DrawnRows:
        temperature, top_k = self._temperature[rows_S], self._top_k[rows_S]
        top_p, min_p = self._top_p[rows_S], self._min_p[rows_S]
        truncates = (top_k > 0) | ((top_p > 0) & (top_p < 1)) | (min_p > 0)
        flags = SamplingFlags(
            all_greedy=bool((temperature == 0).all()),
            any_greedy=bool((temperature == 0).any()),
            any_truncation=bool((truncates & (temperature > 0)).any()),
            any_logprobs=bool(self._wants_logprobs[rows_S].any()),
            any_ranks=bool(self._wants_ranks[rows_S].any()),
            top_n=int(self._top_n[rows_S].max(initial=0)),
        )
        inputs = {
            "sample_rows_S": rows_S.astype(np.int64),
            "temperature_S": temperature,
            "top_k_S": top_k,
            "top_p_S": top_p,
            "min_p_S": min_p,
            "mode_S": self._mode[rows_S],
            "flags": flags,
        }
        return _DrawnRows(inputs=inputs, seeds=self._seeds[rows_S])


def _distinct(sources_S: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the distinct sources, which come in rising order, and which one each sample has."""
    is_new_S = np.ones(len(sources_S), dtype=np.bool_)
    np.not_equal(sources_S[1:], sources_S[:-1], out=is_new_S[1:])
    return sources_S[is_new_S], np.cumsum(is_new_S, dtype=np.int64) - 1
