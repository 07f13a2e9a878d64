"""Known: the oracle's state of one request, and its comparison with the engine's document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rollout import DynamicInferenceRequest, SamplingParams, Status
from tests.engine.dense_model import Array, Position

TOLERANCE = 1e-4
_STATUS = {
    "waiting": Status.WAITING_IN_QUEUE,
    "running": Status.ACTIVE_AND_GENERATING_TOKENS,
    "paused": Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
}


@dataclass(slots=True, eq=False, kw_only=True)
class Known:
    """One request. `kv` holds the positions whose KV is written now.

    `logprobs_TV` and `scores_TV` are the log-probs of the whole vocabulary, where a token was
    generated and where a prompt token was scored.
    """

    request_id: int
    priority: int  # as given
    order: tuple[int, int]  # as the scheduler's: that of a promoted request is a smaller one
    prompt: list[int]
    params: SamplingParams
    entry_version: int
    tokens: list[int]
    max_length: int
    is_clamped: bool
    end_ids: tuple[int, ...]
    events: list[str]
    phase: str = "waiting"
    in_context: bool = False  # all known tokens are computed, it decodes
    kv: list[Position] = field(default_factory=list)
    scores_TV: list[Array] = field(default_factory=list)
    logprobs_TV: list[Array] = field(default_factory=list)
    policy: list[int] = field(default_factory=list)
    context_min: list[int] = field(default_factory=list)
    context_mean: list[float] = field(default_factory=list)
    num_segments: int = 1
    num_in_segment: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ended_at: int | None = None

    @property
    def is_done(self) -> bool:
        return self.ended_at is not None

    @property
    def wants_scores(self) -> bool:
        return not self.params.skip_prompt_log_probs

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def copy(self) -> Known:
        """Return a copy that later events do not change."""
        lists = ("tokens", "events", "kv", "scores_TV", "logprobs_TV", "policy")
        lists += ("context_min", "context_mean")
        return replace(self, **{name: list(getattr(self, name)) for name in lists})


def check_document(
    known: Known, request: DynamicInferenceRequest, version: int, tally: Counter[str]
) -> None:
    """Compare a merged document, seen at weights `version`, with what was derived."""
    names = [event.type.name for event in request.events]
    assert names == known.events, f"{names}, expected {known.events}"
    assert request.prompt_tokens.tolist() == known.prompt
    assert request.generated_tokens == known.generated
    assert request.finish_reason == known.finish_reason
    assert request.stop_reason == known.stop_reason
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
    top_n = known.params.top_n_logprobs
    if known.params.return_log_probs:
        _check_chosen(request.generated_log_probs, known.generated, known.logprobs_TV)
        tally["log-probs"] += len(known.logprobs_TV)
    _check_ranks(known, request)
    if top_n:
        _check_top(request.generated_top_n_logprobs, known.logprobs_TV, top_n)
        tally["top-n log-probs"] += top_n * len(known.logprobs_TV)
    else:
        assert request.generated_top_n_logprobs is None
    if known.wants_scores:
        scored = known.prompt[1 : 1 + len(known.scores_TV)]
        _check_chosen(request.prompt_log_probs, scored, known.scores_TV)
        tally["prompt log-probs"] += len(known.scores_TV)
    if known.wants_scores and top_n:
        _check_top(request.prompt_top_n_logprobs, known.scores_TV, top_n)
    else:
        assert request.prompt_top_n_logprobs is None


def _check_chosen(given: torch.Tensor, tokens: list[int], logprobs_TV: list[Array]) -> None:
    """Check the log-prob of each token that is computed so far."""
    assert len(given) == len(logprobs_TV) == len(tokens)
    expected = [row_V[token] for row_V, token in zip(logprobs_TV, tokens, strict=True)]
    assert np.allclose(given.numpy(), expected, rtol=0, atol=TOLERANCE)


def _check_ranks(known: Known, request: DynamicInferenceRequest) -> None:
    if not known.params.return_ranks:
        assert request.generated_ranks is request.prompt_ranks is None
        return
    _check_places(request.generated_ranks, known.generated, known.logprobs_TV)
    if known.wants_scores:
        _check_places(
            request.prompt_ranks, known.prompt[1 : 1 + len(known.scores_TV)], known.scores_TV
        )
    else:
        assert request.prompt_ranks is None


def _check_places(given: list[int] | None, tokens: list[int], logprobs_TV: list[Array]) -> None:
    """Check the rank of each token; tokens within rounding may count or not."""
    assert given is not None
    assert len(given) == len(tokens)
    for rank, token, row_V in zip(given, tokens, logprobs_TV, strict=True):
        low, high = ((row_V > row_V[token] + margin).sum() for margin in (TOLERANCE, -TOLERANCE))
        assert 1 + low <= rank <= high


def _check_top(given: list[dict[int, float]], logprobs_TV: list[Array], top_n: int) -> None:
    """Check the most likely tokens, best first; equal ones may be exchanged."""
    assert len(given) == len(logprobs_TV)
    if not given:
        return
    assert all(len(row) == top_n for row in given)
    keys_TN = np.array([list(row) for row in given])
    values_TN = np.array([list(row.values()) for row in given])
    all_TV = np.stack(logprobs_TV)
    best_TN = np.sort(all_TV, axis=1)[:, ::-1][:, :top_n]
    assert np.allclose(values_TN, best_TN, rtol=0, atol=TOLERANCE)
    named_TN = np.take_along_axis(all_TV, keys_TN, axis=1)
    assert np.allclose(values_TN, named_TN, rtol=0, atol=TOLERANCE)


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
