"""BatchBuilder: turns a StepPlan into the input arrays of one step.

Used by `rollout.worker.model_runner`. Made by `rollout.worker.loading`. It keeps the rows' block
tables and sampling parameters in host arrays from step to step. Shape letters: T tokens, R compute
rows, E = R + 1, L logit rows, M blocks per table, S sample rows, P scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.backends.forward_batch import MODE_CODES
from rollout.backends.step_tensors import HostArray, SamplingFlags, StepInputs, StepLayout
from rollout.step.plan import IntArray, StepPlan
from rollout.step.seeds import UniformsAhead
from rollout.worker.logits_builder import LogitsBuilder

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Arrays of a step that stay the same while the same rows decode.

    row_of_token_T: index of each token's compute row.
    offsets_T: index of each token among the tokens of its row in this step."""

    layout: StepLayout[HostArray]
    row_of_token_T: NDArray[np.int64]
    offsets_T: NDArray[np.int64]
    uniforms_S: UniformsAhead


class BatchBuilder:
    """The rows' block tables and sampling parameters, from which a step's inputs are built. Row 0
    is scratch. The attribute `num_rows` counts row 0, and the constructor's argument does not."""

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
        # Key and arrays of the latest step's rows; None if any of them prefilled.
        self._decoding: tuple[tuple[bytes, ...], _Rows] | None = None

    def build(self, plan: StepPlan) -> StepInputs[HostArray]:
        """Apply the plan's changes to rows and block tables, and return the inputs of its step.
        Returned arrays are never written again, so the next plan may be built while the step
        runs."""
        self._apply_changes(plan)
        rows, block_size = self._rows_of(plan), self.block_size
        layout, row_of_token_T = rows.layout, rows.row_of_token_T
        first_positions_R = plan.context_lens - plan.query_lens
        positions_T = first_positions_R[row_of_token_T] + rows.offsets_T
        num_blocks = -(-int(np.maximum.reduce(plan.context_lens)) // block_size)
        tables_RM = self._tables[plan.rows, :num_blocks]
        indices_T, places_T = np.divmod(positions_T, block_size)
        blocks_T = tables_RM[row_of_token_T, indices_T].astype(np.int64)
        processing = None
        if self._logits.rows:
            processing = self._logits.build(plan, layout.mode_S, layout.temperature_S)
        return StepInputs(
            layout=layout,
            positions_T=positions_T,
            slots_T=blocks_T * block_size + places_T,
            block_tables_RM=tables_RM,
            context_lens_R=plan.context_lens,
            uniforms_S=rows.uniforms_S.at(plan.sample_positions),
            processing=processing,
        )

    def _apply_changes(self, plan: StepPlan) -> None:
        if plan.new_rows:
            self._decoding = None
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
        if len(plan.table_rows):
            self._tables[plan.table_rows, plan.table_indices] = plan.table_blocks

    def _rows_of(self, plan: StepPlan) -> _Rows:
        """Return the arrays of the plan's rows. The arrays of the previous step are returned again
        if the same rows decode."""
        if len(plan.prefill_token_ids):
            self._decoding = None
            return self._gather(plan)
        names = plan.rows.tobytes(), plan.sample_rows.tobytes(), plan.sample_sources.tobytes()
        if self._decoding is None or self._decoding[0] != names:
            self._decoding = names, self._gather(plan)
        return self._decoding[1]

    def _gather(self, plan: StepPlan) -> _Rows:
        num_decode_rows, query_lens = plan.num_decode_rows, plan.query_lens
        query_starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_starts[1:])
        row_of_token = np.repeat(np.arange(len(query_lens)), query_lens)
        num_tokens = len(row_of_token)
        input_rows = np.zeros(num_tokens, dtype=np.int64)
        input_rows[:num_decode_rows] = plan.rows[:num_decode_rows]
        token_ids = np.zeros(num_tokens, dtype=np.int64)
        token_ids[num_decode_rows:] = plan.prefill_token_ids
        sources, draws = _distinct(plan.sample_sources)
        layout = StepLayout(
            input_rows_T=input_rows,
            token_ids_T=token_ids,
            query_starts_E=query_starts,
            # `sources` has each logit row once; more than one sample uses it where a group forks.
            logit_indices_L=np.concatenate([sources, plan.score_sources], dtype=np.int64),
            draws_S=draws,
            **self._sampling(plan.sample_rows),
            score_targets_P=plan.score_targets.astype(np.int64),
            num_decode_rows=num_decode_rows,
            num_drawn_logits=len(sources),
            only_decodes=num_tokens == num_decode_rows,
            draws_in_order=len(sources) == len(draws),
            score_top_n=plan.score_top_n,
            score_ranks=plan.score_ranks,
        )
        return _Rows(
            layout=layout,
            row_of_token_T=row_of_token,
            offsets_T=np.arange(num_tokens) - query_starts[row_of_token],
            uniforms_S=UniformsAhead(self._seeds[plan.sample_rows]),
        )

    def _sampling(self, rows_S: IntArray) -> dict[str, Any]:
        """Return the sampling parameters of `rows_S`, as fields of StepLayout."""
        temperature, top_k = self._temperature[rows_S], self._top_k[rows_S]
        top_p, min_p = self._top_p[rows_S], self._min_p[rows_S]
        top_n, wants_ranks = self._top_n[rows_S], self._wants_ranks[rows_S]
        truncates = (top_k > 0) | ((top_p > 0) & (top_p < 1)) | (min_p > 0)
        flags = SamplingFlags(
            all_greedy=bool((temperature == 0).all()),
            any_greedy=bool((temperature == 0).any()),
            any_truncation=bool((truncates & (temperature > 0)).any()),
            any_logprobs=bool(self._wants_logprobs[rows_S].any()),
            any_ranks=bool(wants_ranks.any()),
            top_n=int(top_n.max(initial=0)),
        )
        return {
            "sample_rows_S": rows_S.astype(np.int64),
            "temperature_S": temperature,
            "top_k_S": top_k,
            "top_p_S": top_p,
            "min_p_S": min_p,
            "mode_S": self._mode[rows_S],
            "flags": flags,
            "asks_more_S": wants_ranks | (top_n > 0),
        }


def _distinct(sources_S: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the distinct values of the sorted `sources_S`, and each sample's index among them."""
    is_new_S = np.ones(len(sources_S), dtype=np.bool_)
    np.not_equal(sources_S[1:], sources_S[:-1], out=is_new_S[1:])
    return sources_S[is_new_S], np.cumsum(is_new_S, dtype=np.int64) - 1
