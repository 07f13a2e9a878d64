"""Pausing: a pause of mode WAIT lets running requests end, whatever other calls come meanwhile."""

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

    async def end_samples(self) -> None:
        for sample in self.samples:
            sample.set_result(None)  # type: ignore[arg-type]
        await self.settle()

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
            await server.end_samples()
            assert (first.done(), second.done()) == (True, True)

    with_stopped_clock(work())


def test_running_requests_go_on_after_a_call_that_stops_engines_in_a_pause_of_mode_wait() -> None:
    async def work() -> None:
        server = Server()
        with server.live.of("a", server.samples):
            pause = await server.begin(PauseMode.WAIT)
            await server.pausing.set_generation_epoch(1)
            assert not pause.done()
            assert server.llm.llm.calls == ["pause", "set_generation_epoch", "unpause"]
            await server.end_samples()
            assert (pause.done(), server.llm.llm.calls[3:]) == (True, ["pause"])
            await server.pausing.set_generation_epoch(2)
            assert server.llm.llm.calls[4:] == ["set_generation_epoch"]

    with_stopped_clock(work())


def test_pause_of_mode_wait_lets_requests_end_that_a_pause_of_mode_keep_has_stopped() -> None:
    async def work() -> None:
        server = Server()
        with server.live.of("a", server.samples):
            await server.pausing.pause(PauseMode.KEEP)
            pause = await server.begin(PauseMode.WAIT)
            assert (pause.done(), server.llm.llm.calls) == (False, ["pause", "unpause"])
            await server.end_samples()
            assert (pause.done(), server.llm.llm.calls[2:]) == (True, ["pause"])

    with_stopped_clock(work())


def test_pause_of_mode_wait_waits_for_requests_that_come_while_another_call_runs() -> None:
    async def work() -> None:
        server = Server()
        has_stats = asyncio.Event()
        stats = server.llm.stats

        async def held_stats() -> Any:
            await has_stats.wait()
            return await stats()

        server.llm.stats = held_stats
        other = asyncio.ensure_future(server.pausing.drop_cached_kv())
        first = await server.begin(PauseMode.WAIT)
        resume = asyncio.ensure_future(server.pausing.resume())
        await server.settle()
        with server.live.of("a", server.samples):
            second = await server.begin(PauseMode.WAIT)
            has_stats.set()
            await server.settle()
            assert (other.done(), resume.done()) == (True, True)
            assert (first.done(), second.done(), server.llm.llm.calls) == (False, False, [])
            await server.end_samples()
            assert (first.done(), second.done(), server.llm.llm.calls) == (True, True, ["pause"])

    with_stopped_clock(work())


def test_pause_of_mode_wait_ends_at_a_resume_while_it_lets_requests_go_on() -> None:
    async def work() -> None:
        server = Server()
        may_unpause = asyncio.Event()
        unpause = server.llm.unpause

        async def held_unpause() -> None:
            await may_unpause.wait()
            await unpause()

        server.llm.unpause = held_unpause
        with server.live.of("a", server.samples):
            await server.pausing.pause(PauseMode.KEEP)
            pause = await server.begin(PauseMode.WAIT)
            resume = asyncio.ensure_future(server.pausing.resume())
            await server.settle()
            may_unpause.set()
            await server.settle()
            assert (pause.done(), resume.done()) == (True, True)
            assert server.llm.llm.calls == ["pause", "unpause"]

    with_stopped_clock(work())
