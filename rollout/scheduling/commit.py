"""commit_step: what the rows of a finished plan learned, stamped with the plan's version."""

from __future__ import annotations

from collections.abc import Sequence as Indices
from dataclasses import dataclass

from rollout.errors import DetokenizeError, NonFiniteLogitsError
from rollout.scheduling.plan_builder import PlannedRows
from rollout.scheduling.sequence import Phase, Sequence
from rollout.scheduling.stopping import finish_reason
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.version_spans import VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that ends with this step: by "stop" or "length", or by `error` with "error".

    kv_spans: the version that wrote each written position's KV.
    """

    request_id: int
    finish_reason: str
    kv_spans: VersionSpans
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompt:
    """The first `num_tokens` tokens of this request's prompt are done.

    kv_spans: the version that wrote each position's KV. The scheduler goes on appending to it until
    the request is queued again, and then leaves it as it is.
    """

    request_id: int
    num_tokens: int
    kv_spans: VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Entries [start, end) of the plan's scored tokens belong to this request, in prompt order."""

    request_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """All that a step changed, for the request documents.

    request_ids, token_ids, sample_indices: the requests that have a new token, that token, and its
    sample row in StepOutput; equally long. A request whose logits were not finite has none.
    finished: those that end, after that token. prefilled: those with a chunk in the step.
    """

    weights_version: int
    request_ids: list[int]
    token_ids: list[int]
    sample_indices: Indices[int]
    finished: list[FinishedRequest]
    prefilled: list[PrefilledPrompt]
    scored: list[ScoredPrompt]


def commit_step(planned: PlannedRows, plan: StepPlan, output: StepOutput) -> Committed:
    """Stamp the written KV and append the sampled tokens, save those of requests that are gone."""
    version = plan.weights_version
    for sequence, count in planned.computed:
        # Also if it is gone: the children of its fork live on in the same blocks.
        sequence.kv_spans.append(count, version)
    for parent, child in planned.forks:
        if child.phase is not Phase.DONE:
            child.adopt_context(parent)
    token_ids: list[int] = output.token_ids.tolist()
    sample_indices: Indices[int] = range(len(token_ids))
    sampled = [s for s in planned.sampled if s.phase is not Phase.DONE]
    failed: list[Sequence] = []
    if len(sampled) < len(token_ids) or not output.is_finite.all():
        sample_indices, failed = _split(planned.sampled, output)
        sampled = [planned.sampled[index] for index in sample_indices]
        token_ids = [token_ids[index] for index in sample_indices]
    return Committed(
        weights_version=version,
        request_ids=[sequence.request_id for sequence in sampled],
        token_ids=token_ids,
        sample_indices=sample_indices,
        finished=[*_append(sampled, token_ids), *(_non_finite(s, version) for s in failed)],
        prefilled=[
            PrefilledPrompt(request_id=s.request_id, num_tokens=num_tokens, kv_spans=s.kv_spans)
            for s, num_tokens in planned.prefilled
            if s.phase is not Phase.DONE
        ],
        scored=_scored(planned),
    )


def _split(sampled: list[Sequence], output: StepOutput) -> tuple[list[int], list[Sequence]]:
    """Return the sample rows with a token, and the sequences whose logits were not finite."""
    is_finite = output.is_finite.tolist()
    live = [index for index, sequence in enumerate(sampled) if sequence.phase is not Phase.DONE]
    return (
        [index for index in live if is_finite[index]],
        [sampled[index] for index in live if not is_finite[index]],
    )


def _append(sampled: list[Sequence], token_ids: list[int]) -> list[FinishedRequest]:
    """Append to each sequence its token; return those that end by it.

    Tokens that cannot end a request, which are nearly all, are found out without a call.
    """
    finished = []
    for sequence, token_id in zip(sampled, token_ids, strict=True):
        tokens, rule = sequence.tokens, sequence.stop_rule
        tokens.append(token_id)
        if token_id in rule.end_ids or len(tokens) >= rule.max_length or rule.stop_words:
            reason: str | None = "error"
            error: Exception | None = None
            try:
                reason = finish_reason(tokens, sequence.num_prompt, rule)
            except DetokenizeError as fault:  # ends its own request only
                error = fault
            if reason is not None:
                finished.append(_finished(sequence, reason, error))
    return finished


def _non_finite(sequence: Sequence, version: int) -> FinishedRequest:
    error = NonFiniteLogitsError(
        f"request {sequence.request_id}: the logits for its next token are not finite under "
        f"weights version {version}; check the weights for NaN, infinity or overflow"
    )
    return _finished(sequence, "error", error)


def _finished(sequence: Sequence, reason: str, error: Exception | None) -> FinishedRequest:
    return FinishedRequest(
        request_id=sequence.request_id,
        finish_reason=reason,
        kv_spans=sequence.kv_spans.copy(),
        error=error,
    )


def _scored(planned: PlannedRows) -> list[ScoredPrompt]:
    scored, start = [], 0
    for sequence, count in planned.scored:
        if sequence.phase is not Phase.DONE:
            scored.append(
                ScoredPrompt(request_id=sequence.request_id, start=start, end=start + count)
            )
        start += count
    return scored
