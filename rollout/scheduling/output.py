"""The scheduler's results: `schedule` returns a SchedulerOutput, `update_from_output` a StepUpdate.

PlannedStep creates both. StepPipeline passes the plan to the executor, and the rest to
OutputProcessor and the engine's counters. Nothing in them changes, except PrefilledPrompt.kv_spans.
"""

from __future__ import annotations

from collections.abc import Sequence as Indices
from dataclasses import dataclass

from rollout.step.plan import StepPlan
from rollout.version_spans import VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The decision of one `Scheduler.schedule` call.

    plan: the step to run; None if nothing can run.
    num_forked: number of requests that share the prompt of their group from this step on.
    num_prefix_hit_tokens: number of tokens whose KV was found in the prefix index.

    The other fields are ids of requests.
    admitted: requests that got a row, in the scheduler's order.
    paused: requests that keep their blocks and wait, because free blocks ran out.
    resumed: requests that continue after a pause.
    preempted: requests that lost their blocks and are queued again, mostly the newest first.
    """

    plan: StepPlan | None
    num_forked: int = 0
    num_prefix_hit_tokens: int = 0
    admitted: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that ends with this step.

    finish_reason: "stop", "length", or "error" if it ends with `error`.
    stop_reason: the stop token id or the stop word that ended it; None for any other end.
    kv_spans: the version that wrote the KV of each position.
    """

    request_id: int
    finish_reason: str
    stop_reason: int | str | None
    kv_spans: VersionSpans
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompt:
    """A request whose prompt has KV for its first `num_tokens` tokens after this step.

    num_cached_tokens: number of these tokens whose KV was found in the prefix index.
    kv_spans: the version that wrote the KV of each position. The scheduler appends to this object
        until the request is queued again, and does not change it afterwards.
    """

    request_id: int
    num_tokens: int
    num_cached_tokens: int
    kv_spans: VersionSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """A request whose prompt tokens are entries [start, end) of the step's scored tokens."""

    request_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """The changes of a step that OutputProcessor writes into the records.

    weights_version: the version of the weights that ran the step.
    request_ids, token_ids, sample_indices: the requests with a new token, that token, and its
        sample row in StepOutput; equally long. A request whose logits were not finite has no new
        token.
    finished: the requests that end with this step, with or without a new token.
    prefilled: the requests for which the step has computed a chunk of the prompt.
    scored: the requests with prompt tokens that the step has scored.
    """

    weights_version: int
    request_ids: list[int]
    token_ids: list[int]
    sample_indices: Indices[int]
    finished: list[FinishedRequest]
    prefilled: list[PrefilledPrompt]
    scored: list[ScoredPrompt]
