"""ServedLLM: the protocol of an LLM behind a server.

Implemented by AsyncLLM and ThreadedLLM (`rollout.apis`), and used by `rollout.serve` and
`rollout.apis.serving`. One contract suite tests both classes.
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
    """An LLM in the server's event loop: AsyncLLM over the engines of a fleet, or ThreadedLLM over
    the engine of this process.

    model_directory: directory of the model and its tokenizer; None for a model without one.
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
        of its samples.

        Unfinished samples are aborted after `deadline_s` seconds, and when their future is
        cancelled. A malformed group raises InvalidRequestError here, or from the futures.
        """
        ...

    def stream_groups(
        self, groups: Sequence[Group], *, priority: int = 0, deadline_s: float | None = None
    ) -> list[list[RequestStream]]:
        """Queue groups as `add_groups` does. Returns a stream for each sample."""
        ...

    def abort_request(self, future: RequestFuture) -> None:
        """Abort a request. Its future resolves to the record with the tokens so far, or fails if no
        engine has the request yet. Does nothing for a request that has ended."""
        ...

    def request_of(
        self, future: RequestFuture, prompt: Prompt, params: SamplingParams
    ) -> DynamicInferenceRequest:
        """Return the request of a future that is done: FAILED if the future has an error."""
        ...

    async def lost(self) -> RolloutError:
        """Wait until no request can be answered any more, and return the error that caused it."""
        ...

    # ---- control calls, beside those of AsyncControlCalls

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace the weights of all engines, or of none."""
        ...

    async def weight_checksums(self, start: int = 0) -> Mapping[int, WeightChecksums]:
        """Return checksums of at most 2,048 weights, from index `start` on, by the engine's rank
        in the fleet."""
        ...

    async def fleet_stats(self) -> FleetStats:
        """Return the counters of each engine, and their sums."""
        ...
