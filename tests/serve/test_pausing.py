"""Pausing: a pause of mode WAIT begins when the last running request ends, whatever the time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.coordinator.client.streams import RequestFuture
from rollout.serve.control.pausing import PauseMode, Pausing
from rollout.serve.live_requests import LiveRequests, RequestLimiter
from rollout.testing import FakeAsyncLLM, FakeLLM

_MANY = 50  # turns of the event loop, more than a pause needs


def with_stopped_clock(work: Any) -> None:
    """Run a coroutine in an event loop whose timers never fire."""
    loop = asyncio.new_event_loop()
    now = loop.time()
    loop.time = lambda: now  # type: ignore[method-assign]
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


class Server:
    """A Pausing over a FakeLLM, and a request of two samples that runs."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.samples = [RequestFuture(i, [1], loop) for i in range(2)]
        self.live = LiveRequests(lambda future: None, on_end=lambda futures: None)
        self.llm: Any = FakeAsyncLLM(FakeLLM())
        limiter = RequestLimiter(max_running=4, max_waiting=4)
        self.pausing = Pausing(self.llm, self.live, limiter)

    async def begin(self, mode: PauseMode) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self.pausing.pause(mode))
        await self.settle()
        return task

    async def settle(self) -> None:
        for _ in range(_MANY):
            await asyncio.sleep(0)


def test_pause_of_mode_wait_begins_when_the_last_sample_ends() -> None:
    async def work() -> None:
        server = Server()
        with server.live.of("a", server.samples):
            pause = await server.begin(PauseMode.WAIT)
            server.samples[0].set_result(None)  # type: ignore[arg-type]
            later = RequestFuture(2, [1], asyncio.get_running_loop())
            with server.live.of("b", [later]):
                server.samples[1].set_result(None)  # type: ignore[arg-type]
                await server.settle()
                assert (pause.done(), server.llm.llm.calls) == (False, [])
                later.set_result(None)  # type: ignore[arg-type]
                await server.settle()
                assert (pause.done(), server.llm.llm.calls) == (True, ["pause"])

    with_stopped_clock(work())


@pytest.mark.parametrize("other", [PauseMode.KEEP, None], ids=["another mode", "resume"])
def test_pause_of_mode_wait_ends_when_another_call_replaces_it(other: PauseMode | None) -> None:
    async def work() -> None:
        server = Server()
        with server.live.of("a", server.samples):
            waiting = await server.begin(PauseMode.WAIT)
            await (server.pausing.resume() if other is None else server.pausing.pause(other))
            await server.settle()
            assert waiting.done()
            assert server.pausing.mode is other
            assert server.llm.llm.calls == ([] if other is None else ["pause"])

    with_stopped_clock(work())


def test_pause_of_mode_wait_goes_on_if_a_resume_is_followed_by_the_same_pause() -> None:
    async def work() -> None:
        server = Server()
        with server.live.of("a", server.samples):
            first = await server.begin(PauseMode.WAIT)
            resume = asyncio.ensure_future(server.pausing.resume())
            second = await server.begin(PauseMode.WAIT)
            assert resume.done()
            assert (first.done(), second.done()) == (False, False)
            assert server.llm.llm.calls == []
            for sample in server.samples:
                sample.set_result(None)  # type: ignore[arg-type]
            await server.settle()
            assert (first.done(), second.done()) == (True, True)

    with_stopped_clock(work())
