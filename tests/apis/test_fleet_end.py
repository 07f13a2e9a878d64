"""shutdown of an LLM over a fleet while other threads use it: every call returns, and nothing is
left."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout import LLM, AsyncLLM, EngineStateError
from rollout.apis import fleet_runtime, weight_push
from rollout.weights.transports import shared
from tests.apis.fake_fleet import WAIT_S, Caller, fake_fleet, memory_files


class SlowWeights:
    """Tensors whose copying has begun when `is_read` is set, and goes on once `may_go_on` is."""

    def __init__(self) -> None:
        self.is_read, self.may_go_on = threading.Event(), threading.Event()
        self.is_lost = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.is_read.set()
        assert self.may_go_on.wait(WAIT_S)
        if self.is_lost:
            raise ZeroDivisionError
        yield "weight", torch.ones(4)


def updating(llm: LLM, weights: Any) -> Caller:
    """A thread that brings `weights`, once it is at work."""
    caller = Caller(lambda: llm.update_weights(weights))
    assert weights.is_read.wait(WAIT_S)
    return caller


def test_shutdown_ends_update_weights_while_it_publishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, weights, before = fake_fleet(monkeypatch), SlowWeights(), memory_files()
    llm = fleet.llm()
    updater = updating(llm, weights)
    later = SlowWeights()
    queued = Caller(lambda: llm.update_weights(later))
    ender = Caller(llm.shutdown)
    assert fleet.processes.is_closing.wait(WAIT_S)
    weights.may_go_on.set()
    assert all([updater.returned(), queued.returned(), ender.returned()])
    assert isinstance(updater.error, EngineStateError)
    assert isinstance(queued.error, EngineStateError)
    assert not later.is_read.is_set()
    assert "shut down before the answer came" in str(updater.error)
    assert ender.error is None
    assert memory_files() == before


def test_shutdown_ends_update_weights_that_engines_do_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, weights, before = fake_fleet(monkeypatch), SlowWeights(), memory_files()
    llm = fleet.llm()
    updater = updating(llm, weights)
    weights.may_go_on.set()
    assert fleet.client.is_updating.wait(WAIT_S)
    llm.shutdown()
    assert updater.returned()
    assert "shut down before the answer came" in str(updater.error)
    assert memory_files() == before


def test_shutdown_does_not_wait_for_a_stuck_update_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_push, "PUBLISH_S", 0.02)
    monkeypatch.setattr(fleet_runtime, "CALLS_S", 0.02)
    fleet, weights = fake_fleet(monkeypatch), SlowWeights()
    llm = fleet.llm()
    updater = updating(llm, weights)
    llm.shutdown()
    assert updater.returned()
    assert isinstance(updater.error, EngineStateError)
    assert "shut down before the answer came" in str(updater.error)
    weights.is_lost = True
    weights.may_go_on.set()


def test_update_weights_releases_memory_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes as long as some steps do, and streams would stand still."""
    fleet, closed_by, close = fake_fleet(monkeypatch), [], os.close
    fleet.client.answers, before = True, memory_files()

    def closing(descriptor: int) -> None:
        if "rollout-weights" in os.readlink(f"/proc/self/fd/{descriptor}"):
            closed_by.append(threading.current_thread())
        close(descriptor)

    monkeypatch.setattr(shared.os, "close", closing)

    async def work() -> None:
        async with AsyncLLM("a model") as llm:
            for _ in range(3):
                await llm.update_weights({"weight": torch.ones(4)})
            fleet.client.answers = False
            cut = asyncio.ensure_future(llm.update_weights({"weight": torch.ones(4)}))
            fleet.client.is_updating.clear()
            await asyncio.to_thread(fleet.client.is_updating.wait, WAIT_S)
        with pytest.raises(EngineStateError):
            await cut

    asyncio.run(work())
    assert memory_files() <= before, "that of the weights, and that of the push on its way"
    assert len(closed_by) >= 2
    assert threading.main_thread() not in closed_by


def test_shutdown_of_several_threads_waits_for_the_processes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    llm, may_end = fleet.llm(), fleet.processes.linger()
    first = Caller(llm.shutdown)
    assert fleet.processes.is_closing.wait(WAIT_S)
    second = Caller(llm.shutdown)
    assert second.waits()
    assert first.waits()
    with pytest.raises(EngineStateError, match="this LLM is shut down"):
        llm.pause()
    may_end.set()
    assert first.returned()
    assert second.returned()
    assert (first.error, second.error) == (None, None)
    assert fleet.processes.num_closed == 1
    llm.shutdown()


def test_control_call_is_answered_whenever_shutdown_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        llm = fake_fleet(monkeypatch).llm()
        has_begun = threading.Event()

        def pause_on(llm: LLM = llm, has_begun: threading.Event = has_begun) -> None:
            while True:
                llm.pause()
                has_begun.set()

        callers = [Caller(pause_on) for _ in range(3)]
        assert has_begun.wait(WAIT_S)
        llm.shutdown()
        assert all([caller.returned() for caller in callers])
        assert {type(caller.error) for caller in callers} == {EngineStateError}


def test_shutdown_continues_when_its_first_caller_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    may_end = fleet.processes.linger()

    async def work() -> None:
        llm = AsyncLLM("a model")
        await llm.start()
        first, second = (asyncio.ensure_future(llm.shutdown()) for _ in range(2))
        await asyncio.to_thread(fleet.processes.is_closing.wait, WAIT_S)
        assert not second.done(), "the processes are there"
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        may_end.set()
        await asyncio.wait_for(second, WAIT_S)
        assert fleet.processes.num_closed == 1
        await llm.shutdown()

    asyncio.run(work())
    assert fleet.processes.num_closed == 1


def test_shutdown_ends_the_processes_when_the_client_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    llm = fleet.llm()

    async def fail() -> None:
        raise ZeroDivisionError

    fleet.client.aclose = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        llm.shutdown()
    assert fleet.processes.num_closed == 1
    with pytest.raises(EngineStateError, match="this LLM is shut down"):
        llm.pause()
