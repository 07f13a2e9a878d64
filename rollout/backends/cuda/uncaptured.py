"""Work that graphs leave out: draws with top-n, ranks or processed logits, and scores of prompts.

In a graph, every replay would pay for this work. `rollout.backends.cuda.graph` runs it after the
replay and merges the results. Shape letters: S samples of the step, K samples that are drawn again,
L logit rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rollout.backends.step_tensors import LAYOUT_TYPES, HostArray, StepInputs, StepLayout
from rollout.step.output import SampleResult, StepOutput


@dataclass(frozen=True, slots=True)
class UncapturedWork:
    """The work that a graph leaves out of a step: K draws, and scores. `inputs` are for
    `Program.draw`, and their `logit_indices_L` index the hidden states that the graph writes.
    `samples` has the indices of the K samples in the step."""

    inputs: StepInputs[HostArray]
    samples: HostArray


def uncaptured_work(inputs: StepInputs[HostArray], num_drawn_rows: int) -> UncapturedWork | None:
    """Return the draws and scores to run after the graph of a step; None if there are none. The
    first `num_drawn_rows` rows of the graph's hidden states are for draws. Rows for scores
    follow."""
    layout, processing = inputs.layout, inputs.processing
    asks_more_S, num_scores = layout.asks_more_S, len(layout.score_targets_P)
    if processing is None and not num_scores and not asks_more_S.any():
        return None
    samples_K = np.flatnonzero(asks_more_S)
    if processing is not None:
        samples_K = np.union1d(samples_K, processing.samples_K)
        among_K = np.searchsorted(samples_K, processing.samples_K)
        processing = replace(processing, samples_K=among_K)
    chosen = StepInputs(
        layout=_draws(layout, samples_K, num_drawn_rows + np.arange(num_scores)),
        positions_T=inputs.positions_T[:0],
        slots_T=inputs.slots_T[:0],
        block_tables_RM=inputs.block_tables_RM[:0],
        context_lens_R=inputs.context_lens_R[:0],
        uniforms_S=inputs.uniforms_S[samples_K],
        processing=processing,
    )
    return UncapturedWork(chosen, samples_K)


def _draws(
    layout: StepLayout[HostArray], samples_K: HostArray, scored_rows: HostArray
) -> StepLayout[HostArray]:
    """Return a layout with only the draws of `samples_K`, and scores of the rows `scored_rows`."""
    rows_L, draws_K = np.unique(layout.draws_S[samples_K], return_inverse=True)
    arrays: dict[str, Any] = {}
    for name in LAYOUT_TYPES:
        kind, array = name.rpartition("_")[2], getattr(layout, name)
        arrays[name] = array if kind == "P" else array[samples_K] if kind == "S" else array[:0]
    arrays["draws_S"] = draws_K
    arrays["logit_indices_L"] = np.concatenate([rows_L, scored_rows])
    return replace(
        layout,
        **arrays,
        num_decode_rows=0,
        num_drawn_logits=len(rows_L),
        draws_in_order=len(rows_L) == len(samples_K),
        asks_more_S=layout.asks_more_S[samples_K],
    )


def merge_results(result: StepOutput, more: StepOutput, samples: HostArray) -> StepOutput:
    """Return a graph's `result` merged with the results `more` of the work that the graph left out.

    `samples` has the indices of the samples that were drawn again. All their numbers come from
    `more`, so that a token's log-prob equals its entry in the top-n exactly. Arrays that only
    `more` has are zero for other samples.
    """
    merged = _merged(result.samples, more.samples, samples) if len(samples) else result.samples
    return replace(result, samples=merged, scores=more.scores)


def _merged(samples: SampleResult, drawn: SampleResult, places: HostArray) -> SampleResult:
    """Return `samples` with the entries at `places` replaced by `drawn`."""
    merged: dict[str, Any] = {}
    for name in (field.name for field in fields(samples)):
        known, new = getattr(samples, name), getattr(drawn, name)
        if new is not None:
            shape = (len(samples.token_ids_S), *new.shape[1:])
            merged[name] = np.zeros(shape, new.dtype) if known is None else known.copy()
            merged[name][places] = new
    return replace(samples, **merged)
