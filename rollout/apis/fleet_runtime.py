"""FleetRuntime: an AsyncLLM for threads, which its own thread's event loop serves."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from rollout.apis.async_llm import AsyncLLM
from rollout.apis.prompts import Prompt
from rollout.apis.text_output import finished_request
from rollout.config import KVCacheManagementMode
from rollout.coordinator.client.streams import RequestFuture
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.state import EngineState
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.request import Status
from rollout.runner.weight_update import NamedTensors, WeightUpdateReport
from rollout.sampling_params import SamplingParams

_T = TypeVar("_T")
_VERBS_S = 5.0  # how long the end waits for verbs that the end of the fleet has not ended


class FleetRuntime:
    """A Runtime. `make` makes the AsyncLLM; what it raises is raised."""

    def __init__(self, make: Callable[[], AsyncLLM]) -> None:
        self._llm = make()
        self._pid = os.getpid()  # whose threads answer
        self.tokenizer = self._llm.tokenizer
        self._ended: queue.SimpleQueue[DynamicInferenceRequest] = queue.SimpleQueue()
        # Written by the loop's thread alone; what leaves it is in `_ended` before.
        self._open: dict[int, RequestFuture] = {}
        self._turn = threading.Lock()  # held to schedule, so that nothing is after the end
        self._end: Future[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fleet runtime", daemon=True)
        self._thread.start()
        try:
            self._do(self._llm.start())
        except BaseException:
            self.shutdown()
            raise

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            self._require_own_process()
            with self._turn:
                if self._end is not None:
                    raise EngineStateError("this LLM is shut down; make a new one")
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except EngineStateError:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise EngineStateError("this LLM was shut down before the answer came") from None

    def _require_own_process(self) -> None:
        """Raise EngineStateError in a child of os.fork: the thread that answers is not there."""
        if os.getpid() != self._pid:
            raise EngineStateError(
                f"this LLM belongs to process {self._pid}, of which this one is a fork; make one "
                "here, or an InferenceClient"
            )

    # ---- requests

    def submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[Sequence[int]]:
        """Queue all groups or none. Raises InvalidRequestError.

        What only an engine can tell, such as an id beyond the vocabulary, fails the request later.
        """
        if self.tokenizer is None and any(isinstance(prompt, str) for prompt, _ in groups):
            raise InvalidRequestError("a text prompt needs a tokenizer; pass LLM(..., tokenizer=)")
        return self._do(self._submit(groups, priority))

    async def _submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[Sequence[int]]:
        client = self._llm.client
        sent: list[list[RequestFuture]] = []
        try:
            for prompt, each in groups:
                sent.append(client.add_group(prompt, each, priority=priority))
        except BaseException:
            for futures in sent:
                for future in futures:
                    future.cancel()
            raise
        for (prompt, each), futures in zip(groups, sent, strict=True):
            for params, future in zip(each, futures, strict=True):
                self._open[future.request_id] = future
                future.add_done_callback(partial(self._note_ended, prompt, params))
        return [[future.request_id for future in futures] for futures in sent]

    def _note_ended(self, prompt: Prompt, params: SamplingParams, future: Any) -> None:
        if not future.cancelled():
            self._ended.put(self._outcome(prompt, params, future))
        del self._open[future.request_id]

    def _outcome(
        self, prompt: Prompt, params: SamplingParams, future: Any
    ) -> DynamicInferenceRequest:
        error = future.exception()
        if error is None:
            return finished_request(future.result(), self.tokenizer)
        return self._failed(future.request_id, prompt, params, error)

    def _failed(
        self, request_id: int, prompt: Prompt, params: SamplingParams, error: Exception
    ) -> DynamicInferenceRequest:
        """Return a FAILED request with the error, for one that has no record."""
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_tokens=torch.tensor(self._ids_of(prompt), dtype=torch.int64),
            sampling_params=params,
            status=Status.FAILED,
        )
        request.finish_reason = "error"
        request.add_event_error_nontransient(error)
        request.add_event_fail()
        return request

    def _ids_of(self, prompt: Prompt) -> list[int]:
        """None of a text that the tokenizer fails on, which may be why its request failed."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]  # of arrays of any kind
        with suppress(Exception):
            if self.tokenizer is not None:
                return self.tokenizer.encode(prompt)
        return []

    def advance(self, timeout_s: float | None) -> list[DynamicInferenceRequest]:
        """Wait until a request has ended. One that was lost with the coordinator ends FAILED."""
        self._require_own_process()
        if not self._open and self._ended.empty():
            raise EngineStateError("nothing was submitted that could still end")
        if self._ended.empty() and self.state is not EngineState.RUNNING:
            raise EngineStateError(
                f"the engines are {self.state.name}, so nothing ends; unpause() first"
            )
        try:
            first = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [first, *self._drain()]

    def _drain(self) -> list[DynamicInferenceRequest]:
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def abort(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequest]:
        """End requests now; waits for their records."""
        self._do(self._abort(request_ids))
        return self._drain()

    async def _abort(self, request_ids: Sequence[int]) -> None:
        futures = [self._open[i] for i in request_ids if i in self._open]
        for future in futures:
            self._llm.client.abort(future.request_id)
        if futures:
            await asyncio.wait(futures)
            await asyncio.sleep(0)  # for the callbacks that note them

    def drop(self, request_ids: Sequence[int]) -> None:
        self._do(self._drop(request_ids))

    async def _drop(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id in self._open:
                self._open[request_id].cancel()

    # ---- control

    @property
    def state(self) -> EngineState:
        return self._llm.state

    @property
    def weights_version(self) -> int:
        return self._llm.weights_version

    def pause(self) -> None:
        self._do(self._llm.pause())

    def unpause(self) -> None:
        self._do(self._llm.unpause())

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        discard_weights: bool,
    ) -> SuspendReport:
        return self._do(self._llm.suspend(mode, release, discard_weights))

    def resume(self, only: str | None) -> ResumeReport:
        return self._do(self._llm.resume(only))

    def set_generation_epoch(self, version: int) -> None:
        self._do(self._llm.set_generation_epoch(version))

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None, in_flight: bool
    ) -> WeightUpdateReport:
        return self._do(self._llm.update_weights(named_tensors, version, in_flight))

    def stats(self) -> EngineStats:
        return self._do(self._llm.stats())

    def shutdown(self) -> None:
        """Whoever calls it waits for the end. A fork leaves the engines to its parent."""
        if os.getpid() != self._pid:
            return
        with self._turn:
            if self._end is None:
                self._end = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
                self._end.add_done_callback(
                    lambda _: self._loop.call_soon_threadsafe(self._loop.stop)
                )
        try:
            self._end.result()
        finally:
            self._thread.join()

    async def _shut_down(self) -> None:
        """Verbs under way come to their end, or are cancelled: somebody waits for each."""
        try:
            await self._llm.shutdown()
        finally:
            verbs = asyncio.all_tasks() - {asyncio.current_task()}
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*verbs, return_exceptions=True), _VERBS_S)
