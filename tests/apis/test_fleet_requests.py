"""Requests of an LLM over a fleet: each submitted one ends once, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollout import (
    AsyncLLM,
    DetokenizeError,
    InvalidRequestError,
    RolloutGroup,
    SamplingParams,
    Status,
)
from rollout.coordinator.dealer import CoordinatorLostError
from tests.apis.fake_fleet import WAIT_S, fake_fleet

Ended = tuple[Status | None, str | None]
DONE, LOST = (Status.COMPLETED, "length"), (Status.FAILED, "error")


def ends_of(groups: Sequence[RolloutGroup]) -> list[list[Ended]]:
    return [[(r.status, r.finish_reason) for r in group.requests] for group in groups]


def test_a_priority_reaches_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_had_ended_before_the_coordinator_was_lost_is_handed_out(
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


def test_a_coordinator_that_is_back_serves_as_if_it_had_never_been_lost(
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
def test_a_lost_request_has_a_prompt_also_with_a_tokenizer_that_raises(
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


def test_a_request_that_ended_keeps_its_tokens_where_its_tokenizer_raises(
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


def test_streaming_is_refused_as_it_is_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        for verb in (llm.generate, llm.submit):
            with pytest.raises(InvalidRequestError, match=r"AsyncLLM\.stream"):
                verb([[1], [2]], [SamplingParams(), SamplingParams(streaming=True)])
        assert not fleet.client.futures


def test_an_interrupted_generate_aborts_its_own_requests_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fake_fleet(monkeypatch)
    with fleet.llm() as llm:
        (mine,) = llm.submit([1], n=2)

        def interrupted(timeout_s: float | None) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(llm._runtime, "advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[2], [3]], n=2)
        assert fleet.client.open_ids == [0, 1]
        fleet.client.reply(0, 1)
        groups = llm.collect()
        assert [group.group_id for group in groups] == [mine]
        assert ends_of(groups) == [[DONE, DONE]]
        fleet.client.answers = True
        assert llm.generate([4]).status is Status.COMPLETED
