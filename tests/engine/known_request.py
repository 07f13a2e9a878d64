"""What the oracle knows of one request, and the comparison with the engine's document of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch

from rollout import DynamicInferenceRequest, SamplingParams, Status
from tests.engine.dense_model import Position

TOLERANCE = 1e-4
_STATUS = {
    "waiting": Status.WAITING_IN_QUEUE,
    "running": Status.ACTIVE_AND_GENERATING_TOKENS,
    "paused": Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
}


@dataclass(slots=True, eq=False, kw_only=True)
class Known:
    """One request. `kv` holds the positions whose KV is written now."""

    request_id: int
    order: tuple[int, int]
    prompt: list[int]
    params: SamplingParams
    entry_version: int
    tokens: list[int]
    max_length: int
    events: list[str]
    phase: str = "waiting"
    in_context: bool = False  # all known tokens are computed, it decodes
    kv: list[Position] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy: list[int] = field(default_factory=list)
    context_min: list[int] = field(default_factory=list)
    context_mean: list[float] = field(default_factory=list)
    num_segments: int = 1
    num_in_segment: int = 0
    finish_reason: str | None = None
    ended_at: int | None = None

    @property
    def is_done(self) -> bool:
        return self.ended_at is not None

    @property
    def wants_scores(self) -> bool:
        return not self.params.skip_prompt_log_probs


def check_document(
    known: Known, request: DynamicInferenceRequest, version: int, tally: Counter[str]
) -> None:
    """Compare a merged document, seen at weights `version`, with what was derived."""
    names = [event.type.name for event in request.events]
    assert names == known.events, f"{names}, expected {known.events}"
    assert request.prompt_tokens.tolist() == known.prompt
    assert request.generated_tokens == known.tokens[len(known.prompt) :]
    assert request.finish_reason == known.finish_reason
    assert request.status is _status(known)
    assert request.policy_versions.tolist() == known.policy
    assert request.context_kv_version_min == known.context_min
    assert np.allclose(request.context_kv_version_mean, known.context_mean, rtol=0, atol=1e-9)
    _check_logprobs(known, request, tally)
    _check_staleness(known, request, version)
    tally["documents"] += 1


def _status(known: Known) -> Status:
    if known.is_done:
        is_failed = known.finish_reason in ("abort", "error")
        return Status.FAILED if is_failed else Status.COMPLETED
    return _STATUS[known.phase]


def _check_logprobs(known: Known, request: DynamicInferenceRequest, tally: Counter[str]) -> None:
    pairs = []
    if known.params.return_log_probs:
        pairs.append((request.generated_log_probs, known.logprobs))
        tally["log-probs"] += len(known.logprobs)
    if known.wants_scores:
        pairs.append((request.prompt_log_probs, known.scores))
        tally["prompt log-probs"] += len(known.scores)
    for given, expected in pairs:
        assert len(given) == len(expected)
        assert np.allclose(given.numpy(), expected, rtol=0, atol=TOLERANCE)


def _check_staleness(known: Known, request: DynamicInferenceRequest, version: int) -> None:
    now = version if known.ended_at is None else known.ended_at
    policy = torch.tensor([known.entry_version] * len(known.prompt) + known.policy)
    written = [entry.version for entry in known.kv]
    missing = [now] * (len(known.tokens) - len(written))
    if missing and known.is_done and known.policy:
        missing[-1] = known.policy[-1]  # no forward pass will ever write the last token's KV
    kv = torch.tensor(written + missing)
    assert request.completed_at_version == known.ended_at
    assert torch.equal(request.policy_staleness, (now - policy).int())
    assert torch.equal(request.kv_cache_staleness, (now - kv).int())
    for given, stamps in zip(request.staleness_at(now + 3), (policy, kv), strict=True):
        if known.is_done:
            assert torch.equal(given, (now + 3 - stamps).int())
