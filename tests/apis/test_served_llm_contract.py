"""Contract of ServedLLM: the methods that a server calls, on ThreadedLLM and on AsyncLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from rollout import LLM, AsyncLLM, EngineState, InvalidRequestError, SamplingParams
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.requests.token_runs import TokenRun
from rollout.serve.llm import ServedLLM
from tests.apis.fleets import directory
from tests.serve.served import CONFIG
from tests.tiny_models import VOCAB_SIZE, prompt_of
from tests.waiting import until_async as until

pytestmark = pytest.mark.distributed

PROMPT = prompt_of(9)
SHORT = SamplingParams(num_tokens_to_generate=6, seed=3, return_log_probs=True)
ENDLESS = SamplingParams(num_tokens_to_generate=480, ignore_eos=True)
WAIT_S = 100.0
Work = Callable[[ServedLLM], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module", params=["ThreadedLLM", "AsyncLLM"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Work], None]]:
    """Runs a test's coroutine with the LLM."""
    with asyncio.Runner() as runner:
        if request.param == "AsyncLLM":
            fleet = AsyncLLM(directory(), None, CONFIG)
            runner.run(fleet.start())
            yield lambda work: runner.run(asyncio.wait_for(work(fleet), WAIT_S))
            runner.run(fleet.shutdown())
            return
        with LLM(directory(), None, CONFIG) as llm:
            threaded = ThreadedLLM(llm)
            yield lambda work: runner.run(asyncio.wait_for(work(threaded), WAIT_S))
            runner.run(threaded.aclose())


def for_each_llm(test: Work) -> Callable[[Callable[[Work], None]], None]:
    """Turn a coroutine function into a test of both LLMs, in the event loop of each."""

    def on_llm(run: Callable[[Work], None]) -> None:
        run(test)

    on_llm.__name__ = test.__name__
    return on_llm


async def is_empty(llm: ServedLLM) -> bool:
    stats = await llm.stats()
    return not (stats.num_running or stats.num_waiting or stats.num_paused)


@for_each_llm
async def test_add_groups_resolves_to_records_in_order(llm: ServedLLM) -> None:
    added = llm.add_groups([(PROMPT, [SHORT, SHORT]), ([1, 2], [SHORT])])
    assert list(map(len, added)) == [2, 1]
    for prompt, futures in zip((PROMPT, [1, 2]), added, strict=True):
        for future in futures:
            record = await future
            assert record[0].prompt_tokens.tolist() == prompt
            request = llm.request_of(future, prompt, SHORT)
            assert request.request_id == future.request_id
            assert len(request.generated_tokens) == 6


@for_each_llm
async def test_stream_groups_gives_each_token_once_then_the_record(llm: ServedLLM) -> None:
    ((stream,),) = llm.stream_groups([(PROMPT, [SHORT])])
    *runs, record = [item async for item in stream]
    tokens = [token for run_ in runs for token in run_.token_ids.tolist()]
    log_probs = [value for run_ in runs for value in run_.log_probs.tolist()]
    request = record.merge()
    assert tokens == request.generated_tokens
    assert log_probs == pytest.approx(request.generated_log_probs)
    ((future,),) = llm.add_groups([(PROMPT, [SHORT])])
    assert (await future).merge().generated_tokens == tokens


@for_each_llm
async def test_abort_request_resolves_to_the_tokens_so_far(llm: ServedLLM) -> None:
    ((stream,),) = llm.stream_groups([(PROMPT, [ENDLESS])])
    first = await anext(stream)
    assert isinstance(first, TokenRun)
    llm.abort_request(stream.future)
    *_, record = [item async for item in stream]
    assert record.current.finish_reason == "abort"
    assert record.merge().generated_tokens[: len(first)] == first.token_ids.tolist()
    llm.abort_request(stream.future)  # has ended
    assert await is_empty(llm)


@for_each_llm
async def test_stream_yields_ids_then_the_request(llm: Any) -> None:
    *pieces, request = [item async for item in llm.stream(PROMPT, SHORT)]
    assert [token for piece in pieces for token in piece] == request.generated_tokens
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        await anext(llm.stream(PROMPT, SHORT, as_text=True))


@for_each_llm
async def test_abort_ends_the_named_requests_or_all(llm: Any) -> None:
    ((first, second),) = llm.stream_groups([(PROMPT, [ENDLESS, ENDLESS])])
    await anext(first)
    await anext(second)
    assert await llm.abort([first.request_id, 10**9]) == 1
    assert first.future.done()
    assert not second.future.done()
    assert await llm.abort() == 1
    assert second.future.result().current.finish_reason == "abort"
    await first.aclose()
    await second.aclose()


@for_each_llm
async def test_deadline_s_aborts_what_a_pause_holds(llm: ServedLLM) -> None:
    await llm.pause()
    ((future,),) = llm.add_groups([(PROMPT, [ENDLESS])], deadline_s=0.05)
    await asyncio.wait([future])
    assert llm.request_of(future, PROMPT, ENDLESS).finish_reason == "abort"
    await llm.unpause()
    assert await is_empty(llm)


@for_each_llm
async def test_a_cancelled_future_and_a_closed_stream_leave_no_request(llm: ServedLLM) -> None:
    ((future,),) = llm.add_groups([(PROMPT, [ENDLESS])])
    ((stream,),) = llm.stream_groups([(PROMPT, [ENDLESS])])
    await anext(stream)
    future.cancel()
    await stream.aclose()
    await until(lambda: is_empty(llm), "both requests are aborted")
    assert future.cancelled()


@for_each_llm
async def test_an_id_beyond_the_vocabulary_fails_its_future(llm: ServedLLM) -> None:
    ((future,),) = llm.add_groups([([VOCAB_SIZE], [SHORT])])
    await asyncio.wait([future])
    assert isinstance(future.exception(), InvalidRequestError)


@for_each_llm
async def test_requests_wait_for_the_end_of_a_pause(llm: ServedLLM) -> None:
    await llm.pause()
    assert llm.state is EngineState.PAUSED
    ((future,),) = llm.add_groups([(PROMPT, [SHORT])])
    while await is_empty(llm):
        await asyncio.sleep(0)
    assert not future.done()
    await llm.unpause()
    assert len((await future).merge().generated_tokens) == 6


@for_each_llm
async def test_fleet_stats_and_weight_checksums_name_one_engine(llm: ServedLLM) -> None:
    fleet = await llm.fleet_stats()
    assert (list(fleet.engines), fleet.state) == ([0], "RUNNING")
    assert fleet.engines[0].num_steps == fleet.together.num_steps
    (page,) = (await llm.weight_checksums()).values()
    assert len(page.checksums) == page.num_weights
    assert not (await llm.weight_checksums(page.num_weights))[0].checksums


@for_each_llm
async def test_lost_waits_as_long_as_requests_are_answered(llm: ServedLLM) -> None:
    lost = asyncio.ensure_future(llm.lost())
    ((future,),) = llm.add_groups([(PROMPT, [SHORT])])
    await asyncio.wait([future])
    assert not lost.done()
    lost.cancel()
