"""ServedLLM: what a server needs of an LLM."""

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
    """An LLM behind a server, in the server's event loop: AsyncLLM over the engines of a fleet, or
    ThreadedLLM over the engine of this process.

    model_directory: a directory with tokenizer files, None without one.
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
        """Queue groups, each a prompt and the parameters of its samples. Returns a future per
        sample. After `deadline_s` seconds the rest is aborted; cancelling a future aborts its
        request, too. Raises InvalidRequestError, or fails the futures with it.
        """
        ...

    def stream_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestStream]]:
        """Queue groups as `add_groups` does. Returns a stream per sample."""
        ...

    def abort_request(self, future: RequestFuture) -> None:
        """Abort a request; its future resolves to the record with the tokens so far. Does nothing
        for a request that has ended.
        """
        ...

    def request_of(
        self, future: RequestFuture, prompt: Prompt, params: SamplingParams
    ) -> DynamicInferenceRequest:
        """Return the request of a future that is done. Without a record it is FAILED."""
        ...

    async def lost(self) -> RolloutError:
        """Wait until no request can be answered any more. Returns the reason."""
        ...

    # ---- control calls, beside those of AsyncControlCalls

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport: ...

    async def weight_checksums(self, start: int = 0) -> Mapping[int, WeightChecksums]:
        """Return a page of the weights' checksums, from the weight at `start` on, of each engine by
        its rank.
        """
        ...

    async def fleet_stats(self) -> FleetStats: ...
