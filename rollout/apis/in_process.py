"""InProcessRuntime: an engine that the caller's thread steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

from rollout.apis.streaming import finished_request
from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.deferred_signals import deferred_signals
from rollout.engine.build import DynamicInferenceEngine
from rollout.errors import EngineStateError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.text import Prompt, Tokenizer
from rollout.weights.update import NamedTensors

# Verbs that move or read the weights, or change their version; they wait while an update is staged.
_USE_WEIGHTS = ("suspend", "resume", "set_generation_epoch", "weights_checksum")


class InProcessRuntime:
    """Runs an LLM's requests by an engine in this process. One thread calls `submit`, `advance`,
    `abort` and `drop`; verbs that other threads `order` take effect between two steps.
    """

    def __init__(self, engine: DynamicInferenceEngine, tokenizer: Tokenizer | None) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self._ended: list[DynamicInferenceRequest] = []
        # Held for each step, and for each command.
        self._turn = TurnLock()
        # Held while an update is staged, which needs the weights in place; always taken first.
        self._weights_turn = TurnLock()

    def submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[Sequence[int]]:
        """Queue all groups or none. Raises InvalidRequestError."""
        with self._turn:
            listed = [(prompt, list(each)) for prompt, each in groups]
            return list(self.engine.add_groups(listed, priority=priority))

    def advance(self, timeout_s: float | None) -> None:
        """Run one step; `take_ended` has the requests that ended. Raises EngineStateError if no
        request can end: the engine is paused or stopped, or has none.
        """
        with self._turn, deferred_signals():
            if self.state is EngineState.RUNNING and not self.engine.has_unfinished_requests():
                raise EngineStateError(
                    "a group can no longer finish: some of its requests were taken from llm.engine "
                    "directly; use llm.abort and llm.collect for what llm.submit queued"
                )
            self._ended += [finished_request(r, self.tokenizer) for r in self.engine.step()]

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Return the requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequest]:
        """End requests now, in any state; returns them."""
        ended = []
        for request_id in request_ids:
            with self._turn:
                record = self.engine.abort_request(request_id)
            ended.append(finished_request(record, self.tokenizer))
        return ended

    def drop(self, request_ids: Sequence[int]) -> None:
        """End requests now, in any state, without a result."""
        for request_id in request_ids:
            # One that has ended may have been handed out.
            with suppress(EngineStateError), self._turn:
                self.engine.abort_request(request_id)

    # ---- control

    @property
    def state(self) -> EngineState:
        return self.engine.state

    @property
    def seed(self) -> int:
        return self.engine.seed

    @property
    def weights_version(self) -> int:
        return self.engine.weights_version

    def order(self, verb: str, *arguments: Any) -> Any:
        """Do the control verb of LLM that has this name; returns what it returns."""
        if verb == "update_weights":
            return self._update_weights(*arguments)
        with self._weights_turn if verb in _USE_WEIGHTS else nullcontext(), self._turn:
            return getattr(self.engine, verb)(*arguments)

    def _update_weights(
        self, named_tensors: NamedTensors, version: int | None, in_flight: bool
    ) -> WeightUpdateReport:
        """Stage beside the steps; only the commit keeps them waiting."""
        with self._weights_turn:
            with self._turn:
                self.engine.check_update(version, in_flight)
            staged = self.engine.stage_weights(named_tensors)
            with self._turn:
                return self.engine.commit_weights(staged, version, in_flight)

    def shutdown(self) -> None:
        with self._turn:
            self.engine.shutdown()


class TurnLock:
    """As threading.RLock, but granted in the order it was asked for.

    `threading.Lock` goes to whoever asks first after a release, and that is the thread which has
    just released it: a loop of steps would starve the thread that brings new weights.
    """

    def __init__(self) -> None:
        self._entrance = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._entrance:  # held while waiting, so that the others wait behind
                self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
