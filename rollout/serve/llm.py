"""ServedLLM: what a server needs of an AsyncLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollout.config import KVCacheManagementMode
from rollout.control.reports import EngineStats, ResumeReport, SuspendReport, WeightUpdateReport
from rollout.control.state import EngineState
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.client.streams import RequestFuture
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.text import Prompt, Tokenizer
from rollout.weights.update import NamedTensors


class ServedLLM(Protocol):
    """The verbs of AsyncLLM that doors call, all in its event loop.

    model_directory: a directory with tokenizer files, None without one.
    """

    tokenizer: Tokenizer | None
    model_directory: str | None

    @property
    def client(self) -> InferenceClient: ...

    @property
    def state(self) -> EngineState: ...

    @property
    def weights_version(self) -> int: ...

    def request_of(
        self, future: RequestFuture, prompt: Prompt, params: SamplingParams
    ) -> DynamicInferenceRequest: ...

    async def pause(self) -> None: ...

    async def unpause(self) -> None: ...

    async def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport: ...

    async def resume(self, only: str | None = None) -> ResumeReport: ...

    async def set_generation_epoch(self, version: int) -> None: ...

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport: ...

    async def weights_checksum(self) -> str: ...

    async def stats(self) -> EngineStats: ...
