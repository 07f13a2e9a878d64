"""Runtime: where an LLM's requests run, in this process or in a fleet of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rollout.apis.prompts import Prompt
from rollout.engine.state import EngineState
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.text import Tokenizer


class Runtime(Protocol):
    """One thread calls `submit`, `advance`, `abort` and `drop`; any may call `order`."""

    tokenizer: Tokenizer | None

    def submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[Sequence[int]]:
        """Queue all groups or none; returns the request ids of each. Raises InvalidRequestError."""
        ...

    def advance(self, timeout_s: float | None) -> list[DynamicInferenceRequest]:
        """Do or await some work; returns what ended, in order, perhaps nothing.

        Raises EngineStateError if waiting is in vain: paused, stopped, or nothing to do.
        """
        ...

    def abort(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequest]:
        """End requests now, in any state. Returns all that has ended meanwhile, those included."""
        ...

    def drop(self, request_ids: Sequence[int]) -> None:
        """End requests now, in any state; nobody wants them. Leaves alone what has ended."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def weights_version(self) -> int: ...

    def order(self, verb: str, *arguments: Any) -> Any:
        """Do the control verb of LLM that has this name; returns what it returns."""
        ...

    def shutdown(self) -> None: ...
