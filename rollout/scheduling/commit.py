"""commit_step: what the rows of a finished plan learned, stamped with the plan's version."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.errors import DetokenizeError
from rollout.scheduling.plan_builder import PlannedRows
from rollout.scheduling.sequence import Phase
from rollout.scheduling.stopping import finish_reason
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.version_spans import VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One token of one request. `index` is its sample row in StepOutput.

    `finish_reason` is None, "stop", "length", or "error": of `error`, or if that is None since its
    logits were not finite (there is no token then). `context_kv_version_min` and `_mean` are over
    the context it attended to, its own source position included.
    """

    request_id: int
    index: int
    token_id: int
    context_kv_version_min: int
    context_kv_version_mean: float
    finish_reason: str | None
    kv_spans: VersionSpans | None  # of all written positions; only with a finish_reason
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Entries [start, end) of the plan's scored tokens belong to this request, in prompt order."""

    request_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """All that a step changed, for the request documents. `prefilled`: (request id, tokens of its
    prompt that are done now) of those with a chunk in the step.
    """

    weights_version: int
    sampled: list[SampledToken]
    prefilled: list[tuple[int, int]]
    scored: list[ScoredPrompt]


def commit_step(behind: PlannedRows, plan: StepPlan, output: StepOutput) -> Committed:
    """Stamp the written KV and append the sampled tokens, save those of requests that are gone."""
    for sequence, count in behind.computed:
        # Also if it is gone: the children of its fork live on in the same blocks.
        sequence.note_written(count, plan.weights_version)
    for parent, child in behind.forks:
        if child.phase is not Phase.DONE:
            child.adopt_context(parent)
    return Committed(
        weights_version=plan.weights_version,
        sampled=_sampled(behind, output),
        prefilled=[(s.request_id, n) for s, n in behind.prefilled if s.phase is not Phase.DONE],
        scored=_scored(behind),
    )


def _sampled(behind: PlannedRows, output: StepOutput) -> list[SampledToken]:
    token_ids, is_finite = output.token_ids.tolist(), output.is_finite
    all_finite = bool(np.all(is_finite))
    sampled = []
    for index, sequence in enumerate(behind.sampled):
        if sequence.phase is Phase.DONE:
            continue
        token_id = token_ids[index]
        sequence.tokens.append(token_id)
        reason: str | None = "error"
        error: Exception | None = None
        if all_finite or is_finite[index]:
            try:
                reason = finish_reason(sequence.tokens, sequence.num_prompt, sequence.stop_rule)
            except DetokenizeError as fault:  # ends its own request only
                error = fault
        sampled.append(
            SampledToken(
                request_id=sequence.request_id,
                index=index,
                token_id=token_id,
                context_kv_version_min=sequence.kv_min,
                context_kv_version_mean=sequence.kv_sum / len(sequence.kv_spans),
                finish_reason=reason,
                kv_spans=sequence.kv_spans.copy() if reason else None,
                error=error,
            )
        )
    return sampled


def _scored(behind: PlannedRows) -> list[ScoredPrompt]:
    scored, start = [], 0
    for sequence, count in behind.scored:
        if sequence.phase is not Phase.DONE:
            scored.append(
                ScoredPrompt(request_id=sequence.request_id, start=start, end=start + count)
            )
        start += count
    return scored
