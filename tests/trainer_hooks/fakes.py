"""An engine that only keeps its state and a log of calls, and finished requests made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollout.config import KVCacheManagementMode
from rollout.control.reports import ResumeReport, SuspendReport, WeightUpdateReport
from rollout.control.state import (
    PAUSE,
    RESUME,
    SUSPEND,
    UNPAUSE,
    EngineState,
    StateMachine,
    Transition,
)
from rollout.errors import EngineStateError, WeightUpdateError
from rollout.requests import DynamicInferenceRequest, Status
from rollout.sampling_params import SamplingParams
from rollout.weights.update import NamedTensors, by_name


class FakeLLM:
    """The control verbs of LLM on the engine's own state machine; weights are kept by name."""

    def __init__(
        self,
        state: EngineState = EngineState.RUNNING,
        weights_version: int = 0,
        released: Sequence[str] = (),
    ) -> None:
        self._machine = StateMachine(state)
        self.released = set(released)
        self.weights_version = weights_version
        self.weights: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    @property
    def state(self) -> EngineState:
        return self._machine.state

    def pause(self) -> None:
        self._run(PAUSE)

    def unpause(self) -> None:
        self._run(UNPAUSE)

    def suspend(
        self, mode: KVCacheManagementMode | None = None, release: Sequence[str] = ()
    ) -> SuspendReport:
        self._run(SUSPEND)
        self.released.update(release)
        self.suspended_with = mode, release
        return SuspendReport(mode="default" if mode is None else mode.value)

    def resume(self, only: str | None = None) -> ResumeReport:
        restored = self.released & {only} if only else set(self.released)
        self.released -= restored
        if self.released:
            self.calls.append(f"resume {only}")
        else:
            self._run(RESUME)
        return ResumeReport(
            mode="default",
            bytes_restored=len(restored),
            restored_by_owner=dict.fromkeys(sorted(restored), 1),
        )

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None
    ) -> WeightUpdateReport:
        self._machine.require_update(in_flight=False)
        if "weights" in self.released:
            raise EngineStateError("resume(only='weights') first")
        self.calls.append("update")
        weights = by_name(named_tensors)
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise WeightUpdateError("not finite")
        self.weights = weights
        self.weights_version = self.weights_version + 1 if version is None else version
        return WeightUpdateReport(
            version=self.weights_version, seconds=0.0, stall_seconds=0.0, num_bytes=0, checksum=""
        )

    def _run(self, transition: Transition) -> None:
        self.calls.append(transition.name)
        with self._machine.command(transition):
            pass


class FakeAsyncLLM(FakeLLM):
    """The same verbs, awaitable."""

    async def pause(self) -> None:  # type: ignore[override]
        super().pause()

    async def unpause(self) -> None:  # type: ignore[override]
        super().unpause()

    async def suspend(  # type: ignore[override]
        self, mode: KVCacheManagementMode | None = None, release: Sequence[str] = ()
    ) -> SuspendReport:
        return super().suspend(mode, release)

    async def resume(self, only: str | None = None) -> ResumeReport:  # type: ignore[override]
        return super().resume(only)

    async def update_weights(  # type: ignore[override]
        self, named_tensors: NamedTensors, version: int | None = None
    ) -> WeightUpdateReport:
        return super().update_weights(named_tensors, version)


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
    """A request whose token i was sampled under versions[i]; its KV was written one step later.

    `kv_versions`: the mean context version of each token; the policy's own by default. Log-probs
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
