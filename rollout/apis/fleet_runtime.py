"""FleetRuntime: runs an AsyncLLM for callers without asyncio.

Used by `rollout.apis.llm`, for `use_coordinator=True`. It starts a thread with an event loop, and
the AsyncLLM's processes.
"""

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

from rollout.apis.async_llm import AsyncLLM
from rollout.control.commands import Command, R
from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.coordinator.client.streams import RequestFuture
from rollout.errors import EngineStateError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.serve.config import ServeConfig
from rollout.text import Prompt
from rollout.weights.transports.base import WeightTransport
from rollout.weights.update import NamedTensors

_T = TypeVar("_T")
CALLS_S = 5.0  # longest wait of a shutdown for running calls, after the fleet has ended


class FleetRuntime:
    """The runtime of an LLM over a fleet, with the methods of InProcessRuntime that LLM calls. The
    constructor calls `make` for a new AsyncLLM, starts it, and raises its errors."""

    def __init__(self, make: Callable[[], AsyncLLM]) -> None:
        self._llm = make()
        self._pid = os.getpid()  # the process with the event loop's thread
        self.tokenizer = self._llm.tokenizer
        self._ended: queue.Queue[DynamicInferenceRequest] = queue.Queue()
        # Unfinished requests, which only the loop's thread writes. A request is put into `_ended`
        # before it is removed here.
        self._open: dict[int, RequestFuture] = {}
        self._lock = threading.Lock()  # guards scheduling: nothing is scheduled after shutdown
        self._end: Future[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fleet runtime", daemon=True)
        self._thread.start()
        try:
            self._run(self._llm.start())
        except BaseException:  # Ctrl-C included, because nothing else can end the thread
            self.shutdown()
            raise

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the event loop, and wait for its result. Raises EngineStateError in a
        forked child, and if the LLM is shut down before the result."""
        try:
            self._require_own_process()
            with self._lock:
                if self._end is not None:
                    raise EngineStateError("this LLM is shut down; make a new one")
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except EngineStateError:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise EngineStateError(
                "this LLM was shut down before this call was answered; make a new one"
            ) from None

    def _require_own_process(self) -> None:
        """Raise EngineStateError in a child of os.fork, which lacks the event loop's thread."""
        if os.getpid() != self._pid:
            raise EngineStateError(
                f"this LLM belongs to process {self._pid}, and this process is a fork of it; make "
                "an LLM here, or an InferenceClient"
            )

    @property
    def seed(self) -> int:
        return self._llm.seed

    # ---- requests

    def submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[Sequence[int]]:
        """Queue all groups or none. Returns the request ids of each group. Raises
        InvalidRequestError for a malformed prompt. A request fails later if only an engine finds
        its fault, such as a token id beyond the vocabulary."""
        return self._run(self._submit(groups, priority))

    async def _submit(
        self, groups: Sequence[tuple[Prompt, Sequence[SamplingParams]]], priority: int
    ) -> list[Sequence[int]]:
        futures = self._llm.client.add_groups(groups, priority=priority)
        for (prompt, each), group in zip(groups, futures, strict=True):
            for params, future in zip(each, group, strict=True):
                self._open[future.request_id] = future
                future.add_done_callback(partial(self._take_ended, prompt, params))
        return [[future.request_id for future in group] for group in futures]

    def _take_ended(self, prompt: Prompt, params: SamplingParams, future: Any) -> None:
        if not future.cancelled():
            self._ended.put(self._llm.request_of(future, prompt, params))
        del self._open[future.request_id]

    def advance(self, timeout_s: float | None) -> None:
        """Wait until a request has ended, or for `timeout_s` seconds (None: without limit).
        `take_ended` then returns the request. If the coordinator is lost, all requests end FAILED.
        Raises EngineStateError if no request is unfinished or the engines do not run."""
        self._require_own_process()
        if not self._open and self._ended.empty():
            raise EngineStateError("no submitted request is unfinished")
        if self._ended.empty() and self.state is not EngineState.RUNNING:
            raise EngineStateError(
                f"the engines are {self.state.name}, so no request ends; unpause() first"
            )
        with self._ended.not_empty:
            self._ended.not_empty.wait_for(lambda: self._ended.queue, timeout_s)

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Return the requests that ended since the last call, without waiting."""
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return ended

    def abort(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequest]:
        """Abort requests and wait for their end. Returns all requests that `take_ended` would
        return."""
        self._run(self._abort(request_ids))
        return self.take_ended()

    async def _abort(self, request_ids: Sequence[int]) -> None:
        futures = [self._open[i] for i in request_ids if i in self._open]
        for future in futures:
            self._llm.client.abort(future.request_id)
        if futures:
            await asyncio.wait(futures)
            await asyncio.sleep(0)  # lets the futures' callbacks run

    def drop(self, request_ids: Sequence[int]) -> None:
        """Cancel requests and discard their results. Ended requests are ignored."""
        self._run(self._drop(request_ids))

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

    def do(self, command: Command[R]) -> R:
        return self._run(self._llm.do(command))

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None, in_flight: bool
    ) -> WeightUpdateReport:
        return self._run(self._llm.update_weights(named_tensors, version, in_flight))

    def weights_checksum(self) -> str:
        return self._run(self._llm.weights_checksum())

    def use_weight_transport(self, transport: str | WeightTransport) -> None:
        self._llm.use_weight_transport(transport)

    def serve(self, config: ServeConfig) -> tuple[str, int]:
        """Serve over HTTP until `stop_serving`. Returns (host, port). See AsyncLLM.serve."""
        self._run(self._llm.serve(config, blocking=False))
        address = self._llm.serving.address
        assert address is not None, "it listens"
        return address

    def require_serving(self) -> None:
        if (error := self._llm.serving.lost) is not None:
            raise error

    def stop_serving(self, drain_timeout_s: float | None) -> None:
        self._run(self._llm.stop_serving(drain_timeout_s))

    def shutdown(self) -> None:
        """End the fleet and wait until it has ended. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
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
        try:
            await self._llm.shutdown()
        finally:
            # Threads of the program wait for these calls.
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), CALLS_S)
