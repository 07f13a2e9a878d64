"""A fleet without processes, under a real AsyncLLM and LLM."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import LLM, SamplingParams
from rollout.apis import async_llm
from rollout.control.commands import Command, FleetResults, Shutdown
from rollout.control.reports import WeightUpdateReport
from rollout.control.state import EngineState
from rollout.coordinator.client.streams import RequestFuture
from rollout.coordinator.protocol.messages import UpdateWeights
from rollout.errors import ClientStateError, CoordinatorLostError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.weights.source import WeightsSource

WAIT_S = 10.0
UPDATED = FleetResults[WeightUpdateReport](state="RUNNING", weights_version=1)


@dataclass
class FakeProcesses:
    """`linger`: closing them takes until `may_end` is set."""

    address: str = "tcp://127.0.0.1:1"
    curve: None = None  # no keys
    is_closing: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event | None = None
    num_closed: int = 0
    # What tells the AsyncLLM that its coordinator is lost.
    lose: Callable[[CoordinatorLostError], object] = lambda error: None

    def linger(self) -> threading.Event:
        self.may_end = threading.Event()
        return self.may_end

    def end_restarts(self) -> None:
        pass

    def close(self) -> None:
        self.is_closing.set()
        if self.may_end is not None:
            assert self.may_end.wait(WAIT_S)
        self.num_closed += 1


class FakeClient:
    """Its requests end when a test says so, or at once where `answers`, and updates there; other
    commands are done at once.
    """

    coordinator = None
    state = EngineState.RUNNING
    weights_version = 0

    def __init__(self) -> None:
        self.futures: dict[int, RequestFuture] = {}
        self.answers = False
        self.refusals: dict[int, Exception] = {}  # by request id, of those answered
        self.priorities: list[int] = []
        self.is_updating = threading.Event()
        self._updates: list[asyncio.Future[Any]] = []

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def aclose(self) -> None:
        self.stop()

    def stop(self) -> None:
        self.fail(ClientStateError("the client was stopped"))
        for order in self._updates:
            if not order.done():
                order.set_exception(ClientStateError("the client was stopped"))

    # ---- what an AsyncLLM orders

    def add_groups(
        self,
        groups: Sequence[tuple[Any, Sequence[SamplingParams]]],
        *,
        priority: int,
        deadline_s: float | None = None,
    ) -> list[list[RequestFuture]]:
        return [self.add_group(params, priority) for _, params in groups]

    def add_group(self, params: Sequence[SamplingParams], priority: int) -> list[RequestFuture]:
        self.priorities.append(priority)
        first, prompt = len(self.futures), np.empty(0, np.int32)
        futures = [RequestFuture(first + i, prompt, self._loop) for i in range(len(params))]
        self.futures |= {future.request_id: future for future in futures}
        if self.answers:
            self._reply([future.request_id for future in futures])
        return futures

    def do(self, command: Command[Any]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        done.set_result(None)
        return done

    def shutdown_engines(self, *, deadline_s: float) -> asyncio.Future[None]:
        return self.do(Shutdown())

    def update_weights(self, source: WeightsSource, *_: Any) -> asyncio.Future[Any]:
        self.is_updating.set()
        self._updates.append(self._loop.create_future())
        if self.answers:
            self.weights_version = 1
            self._updates[-1].set_result(UpdateWeights(source=source).merged(UPDATED))
        return self._updates[-1]

    # ---- what a test has happen, from its own thread

    def reply(self, *request_ids: int) -> None:
        self._in_loop(lambda: self._reply(request_ids))

    def lose(self) -> None:
        """As the real one when it gives the coordinator up."""
        self._in_loop(lambda: self.fail(CoordinatorLostError("it is gone")))

    @property
    def open_ids(self) -> list[int]:
        return [i for i, future in self.futures.items() if not future.done()]

    def fail(self, error: Exception) -> None:
        for request_id in self.open_ids:
            self.futures[request_id].set_exception(error)
            self.futures[request_id].exception()

    def _reply(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id in self.refusals:
                self.futures[request_id].set_exception(self.refusals[request_id])
            else:
                self.futures[request_id].set_result(_record(request_id))

    def _in_loop(self, work: Callable[[], None]) -> None:
        async def do() -> None:
            work()
            await asyncio.sleep(0)  # for the callbacks of what has ended

        asyncio.run_coroutine_threadsafe(do(), self._loop).result(WAIT_S)


def _record(request_id: int) -> DynamicInferenceRequestRecord:
    request = DynamicInferenceRequest(
        request_id=request_id,
        prompt_tokens=[1, 2],
        generated_tokens=[3, 4],
        sampling_params=SamplingParams(),
        status=Status.COMPLETED,
    )
    request.finish_reason = "length"
    return DynamicInferenceRequestRecord([request])


@dataclass
class FakeFleet:
    processes: FakeProcesses = field(default_factory=FakeProcesses)
    client: FakeClient = field(default_factory=FakeClient)

    def llm(self, tokenizer: Any = None) -> LLM:
        return LLM("a model", tokenizer, use_coordinator=True)


def fake_fleet(monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    """What the next LLM or AsyncLLM gets instead of processes and a client."""
    fleet = FakeFleet()

    def processes(*_: Any, on_lost: Any, **__: Any) -> FakeProcesses:
        fleet.processes.lose = on_lost
        return fleet.processes

    monkeypatch.setattr(async_llm, "FleetProcesses", processes)
    monkeypatch.setattr(async_llm, "InferenceClient", lambda *_, **__: fleet.client)
    return fleet


class Caller:
    """A thread that calls something; `error` is what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # a thread's error would go unseen
            self.error = error

    def waits(self) -> bool:
        """Whether it still does, a moment later."""
        self._thread.join(0.05)
        return self._thread.is_alive()

    def returned(self) -> bool:
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()


def memory_files() -> set[int]:
    """Of weights, that this process has open: each by its number."""
    files = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            if "rollout-weights" in os.readlink(descriptor):
                files.add(descriptor.stat().st_ino)
    return files
