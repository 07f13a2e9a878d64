"""The scheduler's results: `schedule` returns a SchedulerOutput, `update_from_output` a StepUpdate.

`rollout.scheduling.planned_step` creates them, and `rollout_vllm.pipeline` creates StepUpdates.
StepPipeline passes plans to the executor, and the other results to OutputProcessor and the
counters. All results are immutable, except for PrefilledPrompt.kv_spans.
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
    num_forked: number of requests that from this step on share the prompt KV of their group.
    num_prefix_hit_tokens: number of tokens whose KV was found in the prefix index.
    admitted: ids of requests that got a row, in the scheduler's order.
    paused: ids of requests that wait, with their blocks, because free blocks ran out.
    resumed: ids of requests that continue after a pause.
    preempted: ids of requests that lost their blocks and are queued again.
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

    finish_reason: "stop", "length" or "error".
    stop_reason: the stop token id or stop word that ended the request; None for any other end.
    kv_spans: the version that wrote the KV of each position.
    error: the error with which the request ends; None for "stop" and "length".
    """

    request_id: int
    finish_reason: str
    stop_reason: int | str | None
    kv_spans: VersionSpans
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefilledPrompt:
    """A request whose prompt has KV for its first `num_tokens` tokens after this step.

    num_cached_tokens: number of these tokens whose KV was found in the prefix index;
        None if that is unknown.
    kv_spans: the version that wrote the KV of each position. The scheduler appends to this object
        until the request is queued again.
    """

    request_id: int
    num_tokens: int
    num_cached_tokens: int | None
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
    request_ids, token_ids, sample_indices: for each new token its request, its id, and its sample
        row in StepOutput. A request whose logits were not finite gets no new token.
    finished: the requests that end with this step.
    prefilled: the requests whose prompt, or a chunk of it, the step has computed.
    scored: the requests with prompt tokens that the step has scored.
    """

    weights_version: int
    request_ids: list[int]
    token_ids: list[int]
    sample_indices: Indices[int]
    finished: list[FinishedRequest]
    prefilled: list[PrefilledPrompt]
    scored: list[ScoredPrompt]
