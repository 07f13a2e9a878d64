"""ServedLLM: the protocol of an LLM that an HTTP server can serve.

AsyncLLM and ThreadedLLM (`rollout.apis`) implement it. `rollout.serve` (server, state, control,
page, vllm) and `rollout.apis.serving` are written against it. `rollout.apis.streaming` and
`rollout.apis.threaded_llm` use Group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollout.control.commands import AsyncControlCalls
from rollout.control.reports import FleetStats, WeightChecksums, WeightUpdateReport
from rollout.control.state import EngineState
from rollout.coordinator.client.streams import RequestFuture, RequestStream
from rollout.errors import RolloutError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.text import Prompt, Tokenizer
from rollout.weights.update import NamedTensors

Group = tuple[Prompt, Sequence[SamplingParams]]


class ServedLLM(AsyncControlCalls, Protocol):
    """An LLM in the server's event loop.

    AsyncLLM sends requests to the engines of a fleet, ThreadedLLM to the engine of its own process.

    model_directory: directory of the model and its tokenizer, or None if the model has no
        directory.
    """

    tokenizer: Tokenizer | None
    model_directory: str | None

    @property
    def state(self) -> EngineState: ...

    @property
    def weights_version(self) -> int: ...

    # ---- requests

    def add_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestFuture]]:
        """Queue groups and return a future for each sample. A group is a prompt and the parameters
        of its samples. Unfinished samples are aborted after `deadline_s` seconds. Cancelling a
        future aborts its sample. For a malformed group, this call or the group's futures raise
        InvalidRequestError."""
        ...

    def stream_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestStream]]:
        """Queue groups as `add_groups` does, and return a stream for each sample."""
        ...

    def abort_request(self, future: RequestFuture) -> None:
        """Abort a request. Does nothing if the request has ended. The future resolves to the record
        with the tokens so far. It fails if no engine has the request yet."""
        ...

    def request_of(
        self, future: RequestFuture, prompt: Prompt, params: SamplingParams
    ) -> DynamicInferenceRequest:
        """Return the request of a finished future. The request has the status FAILED if the future
        has an error."""
        ...

    async def lost(self) -> RolloutError:
        """Wait until the engines can answer no more requests, and return the error that caused
        it."""
        ...

    # ---- control calls, beside those of AsyncControlCalls

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace the weights of all engines, or of none if the update fails."""
        ...

    async def weight_checksums(self, start: int = 0) -> Mapping[int, WeightChecksums]:
        """Return checksums of at most 2,048 weights from index `start` on, keyed by engine rank."""
        ...

    async def fleet_stats(self) -> FleetStats:
        """Return the counters of each engine and their sums."""
        ...
