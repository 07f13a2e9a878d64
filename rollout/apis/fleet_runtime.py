"""FleetRuntime: an AsyncLLM for threads, which its own thread's event loop serves."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from rollout.apis.async_llm import AsyncLLM
from rollout.apis.prompts import Prompt
from rollout.apis.text_output import finished_request
from rollout.config import KVCacheManagementMode
from rollout.coordinator.client.requests import RequestFuture
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.state import EngineState
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.request import Status
from rollout.runner.weight_update import NamedTensors, WeightUpdateReport
from rollout.sampling_params import SamplingParams

_T = TypeVar("_T")


class FleetRuntime:
    """A Runtime. `make` makes the AsyncLLM; what it raises is raised."""

    def __init__(self, make: Callable[[], AsyncLLM]) -> None:
        self._llm = make()
        self.tokenizer = self._llm.tokenizer
        self._ended: queue.SimpleQueue[DynamicInferenceRequest | CoordinatorLostError] = (
            queue.SimpleQueue()
        )
        self._open: dict[int, RequestFuture] = {}  # written by the loop's thread alone
        self._num_open = 0  # submitted and not handed out; of the caller's thread
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fleet runtime", daemon=True
        )
        self._thread.start()
        try:
            self._do(self._llm.start())
        except BaseException:
            self.shutdown()
            raise

    def _do(self, work: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_alive():
            work.close()
            raise EngineStateError("this LLM is shut down; make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- requests

    def submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]]
    ) -> list[Sequence[int]]:
        """Queue all groups or none. Raises InvalidRequestError.

        What only an engine can tell, such as an id beyond the vocabulary, fails the request later.
        """
        if self.tokenizer is None and any(isinstance(prompt, str) for prompt, _ in groups):
            raise InvalidRequestError("a text prompt needs a tokenizer; pass LLM(..., tokenizer=)")
        ids = self._do(self._submit(groups))
        self._num_open += sum(map(len, ids))
        return ids

    async def _submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]]
    ) -> list[Sequence[int]]:
        client = self._llm.client
        sent: list[list[RequestFuture]] = []
        try:
            for prompt, each in groups:
                sent.append(client.add_group(prompt, each))
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
        del self._open[future.request_id]
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._ended.put(finished_request(future.result(), self.tokenizer))
        elif isinstance(error, CoordinatorLostError):
            self._ended.put(error)
        else:
            self._ended.put(self._failed(future.request_id, prompt, params, error))

    def _failed(
        self, request_id: int, prompt: Prompt, params: SamplingParams, error: Exception
    ) -> DynamicInferenceRequest:
        """Of a request that no engine took."""
        ids = (
            self.tokenizer.encode(prompt) if isinstance(prompt, str) and self.tokenizer else prompt
        )
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_tokens=torch.as_tensor(ids, dtype=torch.int64),
            sampling_params=params,
            status=Status.FAILED,
        )
        request.finish_reason = "error"
        request.add_event_error_nontransient(error)
        request.add_event_fail()
        return request

    def advance(self, timeout_s: float | None) -> list[DynamicInferenceRequest]:
        """Wait until a request has ended. Raises CoordinatorLostError if there is no hope."""
        if not self._num_open:
            raise EngineStateError("nothing was submitted that could still end")
        if self._ended.empty() and self.state is not EngineState.RUNNING:
            raise EngineStateError(
                f"the engines are {self.state.name}, so nothing ends; unpause() first"
            )
        try:
            first = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [self._checked(first), *self._drain()]

    def _drain(self) -> list[DynamicInferenceRequest]:
        ended = []
        while not self._ended.empty():
            ended.append(self._checked(self._ended.get()))
        return ended

    def _checked(
        self, item: DynamicInferenceRequest | CoordinatorLostError
    ) -> DynamicInferenceRequest:
        self._num_open -= 1
        if isinstance(item, CoordinatorLostError):
            raise item
        return item

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
        if not self._thread.is_alive():
            return
        try:
            self._do(self._llm.shutdown())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
