"""LLMs without a model in a given state, finished requests made by hand, and a wandb run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollout import testing
from rollout.config import KVCacheManagementMode
from rollout.control.reports import SuspendReport
from rollout.control.state import EngineState
from rollout.requests import DynamicInferenceRequest, Status
from rollout.sampling_params import SamplingParams


class FakeLLM(testing.FakeLLM):
    """A rollout.testing.FakeLLM that starts in a given state, where its `calls` begin."""

    def __init__(
        self,
        state: EngineState = EngineState.RUNNING,
        weights_version: int = 0,
        released: Sequence[str] = (),
    ) -> None:
        super().__init__(weights_version=weights_version)
        if state is not EngineState.RUNNING:
            super().pause()
        if state is EngineState.SUSPENDED:
            super().suspend(release=released)
        self.calls.clear()

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = (),
        discard_weights: bool = False,
    ) -> SuspendReport:
        self.suspended_with = mode, release
        return super().suspend(mode, release, discard_weights)


def fake_async_llm(state: EngineState, released: Sequence[str] = ()) -> testing.FakeAsyncLLM:
    """Return an awaitable FakeLLM in a given state, which is its `llm`."""
    return testing.FakeAsyncLLM(FakeLLM(state, released=released))


TRAINABLE = SamplingParams(return_log_probs=True, logprobs_mode="temperature")


def finished_request(
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    versions: Sequence[int],
    kv_versions: Sequence[float] | None = None,
    params: SamplingParams = TRAINABLE,
    status: Status = Status.COMPLETED,
    logprobs: Sequence[float] | None = None,
) -> DynamicInferenceRequest:
    """Return a request whose token i was sampled under versions[i] and whose KV was written one
    step later.

    `kv_versions`: mean context version of each token, by default the token's own version. Log-probs
    are -1, -2, ... by default.
    """
    fields: dict[str, Any] = {
        "request_id": 7,
        "prompt_tokens": list(prompt),
        "generated_tokens": list(generated),
        "generated_log_probs": torch.tensor(
            [-float(i + 1) for i in range(len(generated))] if logprobs is None else logprobs
        ),
        "sampling_params": params,
        "status": status,
        "weights_version": versions[0] if versions else 0,
        "context_kv_version_mean": [float(v) for v in (kv_versions or versions)],
    }
    request = DynamicInferenceRequest(**fields)
    for version in versions:
        request.policy_spans.append(1, version)
    request.kv_spans.append(len(prompt), request.weights_version)
    for version in versions[1:]:
        request.kv_spans.append(1, version)
    request.freeze_versions(versions[-1] if versions else 0)
    return request


class FakeWandbRun:
    """Records the calls of a wandb run."""

    offline, dir = True, "wandb/offline-run/files"

    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.alerts: list[tuple[str, str, str]] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any]) -> None:
        self.rows.append(data)

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code

    def alert(self, title: str, text: str, level: str) -> None:
        self.alerts.append((title, text, level))
