"""Requests of an LLM over a fleet: each ends once, also after errors, Ctrl-C and the end of the
coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rollout import (
    AsyncLLM,
    DetokenizeError,
    EngineStateError,
    InvalidRequestError,
    RolloutGroup,
    SamplingParams,
    Status,
)
from rollout.apis.fleet_runtime import FleetRuntime
from rollout.errors import CoordinatorLostError
from tests.apis.fake_fleet import WAIT_S, FakeFleet, fake_fleet

Ended = tuple[Status | None, str | None]
DONE, LOST = (Status.COMPLETED, "length"), (Status.FAILED, "error")


def ends_of(groups: Sequence[RolloutGroup]) -> list[list[Ended]]:
    return [[(r.status, r.finish_reason) for r in group.requests] for group in groups]


def test_llm_priority_reaches_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fake_fleet(monkeypatch)
    fleet.client.answers = True

    async def work() -> None:
        async with AsyncLLM("a model") as llm:
            await llm.generate([[1], [2]], n=2, priority=5)

    asyncio.run(work())
    assert fleet.client.priorities == [5, 5]
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        llm.submit([[1]], priority=-3)
        assert fleet.client.priorities == [-3]


def test_collect_returns_groups_that_ended_before_the_coordinator_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        ids = llm.submit([[1], [2], [3]], n=2)
        fleet.client.reply(0)
        fleet.client.lose()
        groups = llm.collect()
        assert [group.group_id for group in groups] == ids
        assert ends_of(groups) == [[DONE, LOST], [LOST, LOST], [LOST, LOST]]
        lost = groups[1].requests[0]
        assert (lost.request_id, lost.prompt_tokens.tolist()) == (2, [2])
        assert type(lost.events[0].payload) is CoordinatorLostError
        assert llm.collect() == []


def test_reconnected_coordinator_serves_the_llm_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        llm.submit([[1], [2]])
        fleet.client.lose()
        fleet.client.answers = True
        for _ in range(2):
            assert llm.generate([3]).status is Status.COMPLETED
        assert ends_of(llm.collect()) == [[LOST], [LOST]]


class BrokenTokenizer:
    """Knows one word."""

    eos_id = bos_id = None
    vocab_size = 10

    def encode(self, text: str) -> list[int]:
        if text != "known":
            raise ZeroDivisionError
        return [7, 8]

    def decode(self, ids: Sequence[int]) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [([5, 6], [5, 6]), (np.array([6, 5])[::-1], [5, 6]), ("known", [7, 8]), ("new", [])],
    ids=str,
)
def test_failed_request_has_its_prompt_when_the_tokenizer_raises(
    prompt: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm(BrokenTokenizer()) as llm:
        llm.submit([prompt])
        fleet.client.lose()
        (group,) = llm.collect(timeout_s=WAIT_S)
        (request,) = group.requests
        assert ends_of([group]) == [[LOST]]
        assert request.prompt_tokens.tolist() == ids
        assert type(request.events[0].payload) is CoordinatorLostError


def test_finished_request_keeps_its_tokens_when_the_tokenizer_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm(BrokenTokenizer()) as llm:
        llm.submit([[5, 6]])
        fleet.client.reply(0)
        (group,) = llm.collect(timeout_s=WAIT_S)
        (request,) = group.requests
        assert ends_of([group]) == [[DONE]]
        assert (len(request.generated_tokens), request.generated_text) == (2, None)
        assert [type(event.payload) for event in request.events] == [DetokenizeError]


def test_llm_over_a_fleet_refuses_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        for method in (llm.generate, llm.submit):
            with pytest.raises(InvalidRequestError, match=r"AsyncLLM\.stream"):
                method([[1], [2]], [SamplingParams(), SamplingParams(streaming=True)])
        assert not fleet.client.futures


def test_interrupted_generate_aborts_only_its_own_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        (mine,) = llm.submit([1], n=2)

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(FleetRuntime, "advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[2], [3]], n=2)
        assert fleet.client.open_ids == [0, 1]
        fleet.client.reply(0, 1)
        groups = llm.collect()
        assert [group.group_id for group in groups] == [mine]
        assert ends_of(groups) == [[DONE, DONE]]
        fleet.client.answers = True
        assert llm.generate([4]).status is Status.COMPLETED


def interrupt_amid(submission: FakeFleet) -> None:
    """Have Ctrl-C come when half of the groups are with the client."""
    client = submission.client
    add_group = client.add_group

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if len(client.futures) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return add_group(*args, **kwargs)

    client.add_group = interrupted  # type: ignore[method-assign]


@pytest.mark.parametrize("method", ["generate", "submit"])
def test_ctrl_c_in_a_submission_leaves_none_of_its_requests(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        (mine,) = llm.submit([1])
        interrupt_amid(fleet)
        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            getattr(llm, method)([[i] for i in range(40)])
        assert signal.getsignal(signal.SIGINT) is handler
        assert fleet.client.open_ids == [0]
        fleet.client.reply(0)
        assert [group.group_id for group in llm.collect()] == [mine]


def test_second_ctrl_c_is_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:

        def interrupted_twice(*_: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError

        with monkeypatch.context() as patch:
            patch.setattr(FleetRuntime, "submit", interrupted_twice)
            with pytest.raises(KeyboardInterrupt):
                llm.submit([1])


@pytest.mark.parametrize("prompts", [[[1], [2], [3]], [1]], ids=["batch", "single"])
def test_async_llm_request_that_no_engine_takes_fails_alone(
    prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fake_fleet(monkeypatch)
    fleet.client.answers = True
    refused = InvalidRequestError("token id 1 is not in the vocabulary")
    fleet.client.refusals = {0: refused}

    async def work() -> None:
        async with AsyncLLM("a model") as llm:
            given = await llm.generate(prompts)
            first, *others = given if isinstance(given, list) else [given]
            assert (first.status, first.finish_reason) == LOST
            assert first.prompt_tokens.tolist() == [1]
            assert str(first.events[0].payload) == str(refused)
            assert [(r.status, r.finish_reason) for r in others] == [DONE] * len(others)

    asyncio.run(work())


@pytest.mark.parametrize("use", [lambda llm: llm.generate([1]), lambda llm: llm.update_weights({})])
def test_pending_calls_name_the_end_of_the_coordinators_process(
    use: Callable[[AsyncLLM], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fake_fleet(monkeypatch)

    async def work() -> None:
        async with AsyncLLM("a model") as llm:
            waiting = asyncio.ensure_future(use(llm))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(fleet.processes.lose, CoordinatorLostError("process 7"))
            for each in (waiting, use(llm)):
                with pytest.raises(CoordinatorLostError, match="process 7"):
                    await asyncio.wait_for(each, WAIT_S)
        with pytest.raises(EngineStateError, match="make a new one"):
            await llm.pause()

    asyncio.run(work())


def test_llm_requests_name_the_lost_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        llm.submit([[1], [2]])
        fleet.processes.lose(CoordinatorLostError("process 7"))
        groups = llm.collect(timeout_s=WAIT_S)
        assert ends_of(groups) == [[LOST], [LOST]]
        assert "process 7" in str(groups[0].requests[0].events[0].payload)
        with pytest.raises(CoordinatorLostError, match="process 7"):
            llm.generate([3])
