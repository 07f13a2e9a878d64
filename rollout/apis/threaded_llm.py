"""ThreadedLLM: the awaitable verbs of AsyncLLM over an LLM in this process, stepped by a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rollout.apis.llm import LLM
from rollout.config import KVCacheManagementMode
from rollout.control.reports import EngineStats, ResumeReport, SuspendReport, WeightUpdateReport
from rollout.control.state import EngineState
from rollout.errors import EngineStateError
from rollout.requests import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.weights.update import NamedTensors

_LOOK_EVERY_S = 0.01  # for new requests, between steps and while the engine is paused
# So many refusals in a row by an engine that reads as RUNNING are an error, not short pauses.
_MAX_REFUSALS = 10

Result = Future[list[DynamicInferenceRequest]]
Job = tuple[Any, SamplingParams | None, int, Result]


class ThreadedLLM:
    """An LLM of this process with the verbs of AsyncLLM, for AsyncRolloutProducer, `evaluate`,
    `generation_phase` and weight syncs. An async context manager.

        with LLM(policy) as llm:
            async with ThreadedLLM(llm) as threaded:
                request = await threaded.generate([1, 2, 3])

    The control verbs run in a thread, so the event loop stays free. The verbs of the LLM itself may
    still be called, except generate, submit and collect. Leaving the ThreadedLLM aborts what is
    unfinished; the LLM stays.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.tokenizer = llm.tokenizer
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._open: dict[int, Result] = {}  # by group id
        self._num_refusals = 0  # since the engine last worked, or was not RUNNING
        self._is_ending = False
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)
        self._thread.start()

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        return self._llm.state

    @property
    def weights_version(self) -> int:
        """The version of the weights that the engine serves."""
        return self._llm.weights_version

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, n: int = 1
    ) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        """`n` samples of one prompt. One gives a request, else a list. Cancelling aborts them.

        Raises InvalidRequestError for a malformed prompt, EngineStateError after the end, and what
        ended the engine.
        """
        result: Result = Future()
        self._jobs.put((prompts, sampling_params, n, result))
        # Checked after the put: the thread may have ended without seeing this job.
        if self._has_ended.is_set():
            self._refuse_new()
        requests = await asyncio.wrap_future(result)
        return requests[0] if n == 1 else requests

    async def pause(self) -> None:
        """Stop at the next step boundary."""
        await asyncio.to_thread(self._llm.pause)

    async def unpause(self) -> None:
        """Let generation go on."""
        await asyncio.to_thread(self._llm.unpause)

    async def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """Give memory back; unfinished requests stay. The engine must be paused."""
        return await asyncio.to_thread(self._llm.suspend, mode, release, discard_weights)

    async def resume(self, only: str | None = None) -> ResumeReport:
        """Allocate the memory again, or that of `only`; then the engine is paused."""
        return await asyncio.to_thread(self._llm.resume, only)

    async def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace all weights in place, or nothing. See LLM.update_weights."""
        return await asyncio.to_thread(self._llm.update_weights, named_tensors, version, in_flight)

    async def stats(self) -> EngineStats:
        """Counters and state of the engine."""
        return await asyncio.to_thread(self._llm.stats)

    async def aclose(self) -> None:
        """Abort what is unfinished and end the thread. Twice is fine."""
        self._is_ending = True
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> ThreadedLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    # ---- in the thread

    def _run(self) -> None:
        error: Exception = EngineStateError("this ThreadedLLM was closed before the answer came")
        try:
            while not self._is_ending:
                self._take_jobs()
                self._abort([i for i, result in self._open.items() if result.cancelled()])
                self._work()
            self._llm.abort(list(self._open))
        except Exception as fault:  # callers must get whatever ends the thread
            error = fault
        for result in self._open.values():
            _fail(result, error)
        self._has_ended.set()
        self._refuse_new()

    def _refuse_new(self) -> None:
        with suppress(queue.Empty):
            while True:
                *_, result = self._jobs.get_nowait()
                _fail(result, EngineStateError("this ThreadedLLM has ended; make a new one"))

    def _take_jobs(self) -> None:
        """Submit new jobs; wait a moment for one if there is nothing to do."""
        with suppress(queue.Empty):
            while True:
                prompt, params, n, result = (
                    self._jobs.get_nowait() if self._open else self._jobs.get(timeout=_LOOK_EVERY_S)
                )
                try:
                    (group_id,) = self._llm.submit([prompt], params, n)
                    self._open[group_id] = result
                except Exception as fault:  # of this prompt alone
                    _fail(result, fault)

    def _work(self) -> None:
        """Step the open groups, or wait a moment. Raises EngineStateError if they cannot finish."""
        if not self._open:
            return
        state = self._llm.state
        if state is EngineState.STOPPED:
            raise EngineStateError("the LLM was shut down before the answer came")
        if state is EngineState.RUNNING:
            self._collect()
        else:
            self._num_refusals = 0
            time.sleep(_LOOK_EVERY_S)

    def _collect(self) -> None:
        try:
            groups = self._llm.collect(num_groups=1, timeout_s=_LOOK_EVERY_S)
        except EngineStateError:  # another thread paused it meanwhile, or nothing is left to end
            self._num_refusals += 1
            if self._num_refusals == _MAX_REFUSALS:
                raise
            time.sleep(_LOOK_EVERY_S)
            return
        self._num_refusals = 0
        for group in groups:
            result = self._open.pop(group.group_id, None)  # None: the LLM had the group before
            if result is not None:
                with suppress(InvalidStateError):  # cancelled at this very moment
                    result.set_result(group.requests)

    def _abort(self, group_ids: list[int]) -> None:
        if group_ids:
            self._llm.abort(group_ids)
        for group_id in group_ids:
            del self._open[group_id]


def _fail(result: Result, error: Exception) -> None:
    with suppress(InvalidStateError):
        result.set_exception(error)
