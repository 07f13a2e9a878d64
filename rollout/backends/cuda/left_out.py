"""What a captured step leaves out, since it would cost every step: the draws that want top-n, ranks
or processed logits, and the scores of prompts.

Shape letters: S samples of the step, K of them that are drawn once more; L logit rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rollout.backends.step_tensors import LAYOUT_TYPES, HostArray, StepInputs, StepLayout
from rollout.step.output import SampleResult, StepOutput


@dataclass(frozen=True, slots=True)
class LeftOut:
    """`inputs`: a step of nothing but K draws and scores, whose `logit_indices_L` are rows of what
    the captured step leaves. `samples`: which samples the K are."""

    inputs: StepInputs[HostArray]
    samples: HostArray


def left_out(inputs: StepInputs[HostArray], num_drawn_rows: int) -> LeftOut | None:
    """What is to be drawn and scored after the captured step; None if nothing is.

    Of the rows that the captured step leaves, the first `num_drawn_rows` are for draws, and the
    scored ones follow.
    """
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
    return LeftOut(chosen, samples_K)


def _draws(
    layout: StepLayout[HostArray], samples_K: HostArray, scored_rows: HostArray
) -> StepLayout[HostArray]:
    """The layout of those draws, and of scores of those rows."""
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


def with_more(result: StepOutput, more: StepOutput, samples: HostArray) -> StepOutput:
    """The result of the captured step with that of what it left out.

    Samples that were drawn once more have all of their numbers from there: a token's log-prob is
    that of its entry in the top-n, to the last bit. What only they want is zero for the others.
    """
    merged = _merged(result.samples, more.samples, samples) if len(samples) else result.samples
    return replace(result, samples=merged, scores=more.scores)


def _merged(samples: SampleResult, drawn: SampleResult, places: HostArray) -> SampleResult:
    """All samples, with what `drawn` has at these places of them."""
    merged: dict[str, Any] = {}
    for name in (field.name for field in fields(samples)):
        known, new = getattr(samples, name), getattr(drawn, name)
        if new is not None:
            shape = (len(samples.token_ids_S), *new.shape[1:])
            merged[name] = np.zeros(shape, new.dtype) if known is None else known.copy()
            merged[name][places] = new
    return replace(samples, **merged)
