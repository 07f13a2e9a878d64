"""InProcessRuntime: runs an LLM's requests and control calls on an engine in this process.

`rollout.apis.spmd` creates it for LLM (`rollout.apis.llm`), and ThreadedLLM
(`rollout.apis.threaded_llm`) uses the LLM's. It changes the engine, and keeps ended requests until
the LLM takes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

from rollout.apis.streaming import finished_request
from rollout.control.commands import Command, R
from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.deferred_signals import deferred_signals
from rollout.engine.engine import Engine
from rollout.errors import EngineStateError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.token_runs import TokenRuns
from rollout.sampling_params import SamplingParams
from rollout.text import Prompt, Tokenizer
from rollout.weights.update import NamedTensors


class InProcessRuntime:
    """Runs an LLM's requests on an engine in this process. Only one thread submits, steps, aborts
    and drops requests. Other threads may make control calls, which take effect between two steps.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, *, has_ranks: bool) -> None:
        """`has_ranks` is whether other processes are ranks of the engine."""
        self.engine, self.tokenizer, self.has_ranks = engine, tokenizer, has_ranks
        self._ended: list[DynamicInferenceRequest] = []
        # Held for each step, and for each command.
        self._step_lock = FairLock()
        # Held while an update is staged: the weights must stay in place. Taken before _step_lock.
        self._weights_lock = FairLock()
        # Called after each control call, because steps may be possible again.
        self.on_command: Callable[[], None] = lambda: None

    def submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[Sequence[int]]:
        """Queue all groups or none. Returns the request ids of each group. Raises
        InvalidRequestError for a malformed prompt."""
        with self._step_lock:
            listed = [(prompt, list(each)) for prompt, each in groups]
            return list(self.engine.add_groups(listed, priority=priority))

    def advance(self, timeout_s: float | None) -> None:
        """Run one step and keep the requests that ended for `take_ended`. `timeout_s` is ignored.
        Raises EngineStateError if the engine is paused or stopped, or has no requests."""
        with self._step_lock, deferred_signals():
            if self.state is EngineState.RUNNING and not self.engine.has_unfinished_requests():
                raise EngineStateError(
                    "a group can no longer finish: some of its requests were taken from llm.engine "
                    "directly; use llm.abort and llm.collect for what llm.submit queued"
                )
            self._ended += [finished_request(r, self.tokenizer) for r in self.engine.step()]

    @property
    def can_step(self) -> bool:
        """Whether the engine runs and has requests. Any thread may read it."""
        return self.state is EngineState.RUNNING and self.engine.has_unfinished_requests()

    def step(
        self, streamed: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[DynamicInferenceRequestRecord], TokenRuns | None]:
        """Run one step if `can_step`. Returns the records of the requests that ended, and new
        tokens. `streamed` has (request id, number of tokens already reported) for each request
        whose new tokens are wanted. The tokens are None if `streamed` is empty or no step ran."""
        with self._step_lock, deferred_signals():
            if not self.can_step:
                return [], None
            records = self.engine.step()
            return records, self.engine.new_tokens(streamed) if streamed else None

    def keep(self, record: DynamicInferenceRequestRecord) -> None:
        """Keep the request of a record that `step` returned, for `take_ended`."""
        self._ended.append(finished_request(record, self.tokenizer))

    def check_ranks(self) -> None:
        with self._step_lock:
            self.engine.check_ranks()

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Return the requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequest]:
        """End requests now, in any state. Returns them with the tokens so far."""
        return [finished_request(self.abort_record(i), self.tokenizer) for i in request_ids]

    def abort_record(self, request_id: int) -> DynamicInferenceRequestRecord:
        """End a request now, in any state. Returns its record with the tokens so far."""
        with self._step_lock:
            return self.engine.abort_request(request_id)

    def drop(self, request_ids: Sequence[int]) -> None:
        """End requests now, in any state, and discard their results. Ended requests are ignored."""
        for request_id in request_ids:
            # A request that has ended is unknown to the engine.
            with suppress(EngineStateError), self._step_lock:
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

    def do(self, command: Command[R]) -> R:
        """Run a control call between two steps and return its result. A call that uses the weights
        waits while an update is staged."""
        try:
            with self._weights_lock if command.uses_weights else nullcontext(), self._step_lock:
                return self.engine.do(command)
        finally:
            self.on_command()

    def weights_checksum(self) -> str:
        """Return a checksum of all weights."""
        with self._weights_lock, self._step_lock:
            return self.engine.weights_checksum()

    def warm_up(self) -> int:
        """Capture steps in advance. Returns the number of captured steps. See Engine.warm_up."""
        with self._step_lock:
            return self.engine.warm_up()

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None, in_flight: bool
    ) -> WeightUpdateReport:
        """Replace all weights, or none. See Engine.update_weights. Steps continue while the update
        is staged, and wait only for its commit."""
        try:
            with self._weights_lock:
                with self._step_lock:
                    self.engine.check_update(version, in_flight)
                staged = self.engine.stage_weights(named_tensors)
                with self._step_lock:
                    return self.engine.commit_weights(staged, version, in_flight)
        finally:
            self.on_command()

    def shutdown(self) -> None:
        with self._step_lock:
            self.engine.shutdown()
        self.on_command()


class FairLock:
    """A reentrant lock that goes to a waiting thread before the releasing thread gets it again. A
    `threading.Lock` usually goes back to the thread that released it. A loop of steps then keeps
    control calls waiting forever."""

    def __init__(self) -> None:
        self._entrance = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._entrance:  # held while waiting, so that a later thread waits here
                self._lock.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
