"""AsyncLLM: generate, stream, abort, start and shutdown of a fleet of processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout import (
    AsyncLLM,
    ConfigError,
    DynamicInferenceRequest,
    EngineState,
    EngineStateError,
    InvalidRequestError,
)
from rollout.apis import fleet_processes
from rollout.apis.fleet_processes import coordinator_arguments
from rollout.child_process import ChildProcess
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoints.loading import build_model
from tests.apis.fake_fleet import memory_files
from tests.apis.fleets import CONFIG, DEADLINE_S, directory, params, until, weights, with_fleet
from tests.apis.history_oracle import HistoryOracle
from tests.apis.leftovers import fleet_pids
from tests.tiny_models import VOCAB_SIZE, prompt_of

pytestmark = pytest.mark.distributed


def check_all(*requests: DynamicInferenceRequest) -> None:
    oracle = HistoryOracle(weights)
    for request in requests:
        oracle.check(request)
    oracle.margins.check()


async def num_running(llm: AsyncLLM) -> int:
    stats = await llm.stats()
    return stats.num_running + stats.num_waiting


def test_async_llm_generate_gives_the_tokens_of_the_trainers_model() -> None:
    async def work(llm: AsyncLLM) -> None:
        prompts = [prompt_of(n) for n in (1, 9, 30)]
        requests = await llm.generate(prompts, [params(i) for i in range(3)], n=2)
        assert isinstance(requests, list)
        assert [len(r.prompt_tokens) for r in requests] == [1, 1, 9, 9, 30, 30]
        check_all(*requests)
        single = await llm.generate(prompts[0], params(3))
        assert isinstance(single, DynamicInferenceRequest)
        assert await llm.generate([]) == []

        is_published, order = asyncio.Event(), llm.client.update_weights

        def noted_order(*args: Any, **options: Any) -> Any:
            is_published.set()
            return order(*args, **options)

        llm.client.update_weights = noted_order  # type: ignore[method-assign]
        cut = asyncio.ensure_future(llm.update_weights(weights(1).state_dict(), in_flight=True))
        await is_published.wait()
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        report = await llm.update_weights(weights(2).state_dict(), in_flight=True)
        assert report.version == 2, "the first one came to its end all the same"
        assert len(memory_files()) == 2, "an engine that comes back finds the last weights"
        check_all(await llm.generate(prompt_of(9), params(1)))

    with_fleet(2, work)


def test_stream_yields_tokens_and_aborts_when_cancelled() -> None:
    async def work(llm: AsyncLLM) -> None:
        pieces = [piece async for piece in llm.stream(prompt_of(9), params(1, 40))]
        *parts, request = pieces
        assert isinstance(request, DynamicInferenceRequest)
        told = [token for part in parts for token in part]
        assert told == request.generated_tokens[: len(told)]
        assert len(parts) > 1
        check_all(request)

        async def is_idle() -> bool:
            return await num_running(llm) == 0

        await llm.pause()  # nothing ends but what is aborted
        left = llm.stream(prompt_of(9), params(1, 400))
        first = asyncio.ensure_future(anext(left))
        batch = asyncio.ensure_future(llm.generate([prompt_of(9), prompt_of(8)], params(1, 400)))
        with pytest.raises(InvalidRequestError):
            await llm.generate([prompt_of(9), []], params(1, 400))
        await until(lambda: num_is(llm, 3), "three requests are with the engine")
        for task in (first, batch):
            task.cancel()
        await asyncio.gather(first, batch, return_exceptions=True)
        await until(is_idle, "they are aborted")

    with_fleet(1, work)


def test_abort_returns_requests_with_their_tokens_in_every_state() -> None:
    """Two run, others wait in the engine, in the coordinator and in the client."""

    async def work() -> None:
        limits = {"limits": CoordinatorLimits(max_client_requests=14)}
        config = CONFIG.replace(max_requests=2)
        async with AsyncLLM(directory(), None, config, coordinator_options=limits) as llm:
            for mode in (None, "persist", "offload", "recompute"):
                await check_abort(llm, mode)
            check_all(await llm.generate(prompt_of(9), params(1)))

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


async def check_abort(llm: AsyncLLM, mode: str | None) -> None:
    wanted = params(1, 400, return_log_probs=True, return_ranks=True)
    stream = llm.stream(prompt_of(9), wanted)
    first = await anext(stream)
    others = [asyncio.ensure_future(llm.generate(prompt_of(4 + i), wanted)) for i in range(16)]
    late = asyncio.ensure_future(anext(llm.stream(prompt_of(9), wanted)))
    await until(lambda: num_is(llm, 10), "the engine has as many as it takes")
    if mode is not None:
        await llm.pause()
        await llm.suspend(mode)
    ids = sorted(llm.client.completion_futures)
    assert await llm.abort([ids[-1], 10**6, ids[-1]]) == 1
    assert (await late).finish_reason == "abort"
    assert await llm.abort() == 17
    assert await llm.abort() == 0
    parts = [first, *[piece async for piece in stream]]
    streamed = parts.pop()
    assert [token for part in parts for token in part] == streamed.generated_tokens
    for request in (streamed, *await asyncio.gather(*others)):
        assert (request.finish_reason, request.stop_reason) == ("abort", None)
        num_tokens = len(request.generated_tokens)
        assert len(request.policy_versions) == num_tokens < 400
        for values in (request.generated_log_probs, request.generated_ranks):
            assert (0 if values is None else len(values)) == num_tokens
    assert len(streamed.generated_tokens) > 0
    assert await num_running(llm) == 0
    if mode is not None:
        await llm.resume()
        await llm.unpause()


async def num_is(llm: AsyncLLM, count: int) -> bool:
    return await num_running(llm) == count


class LetterTokenizer:
    """One token per character."""

    eos_id = bos_id = None
    vocab_size = VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)


@pytest.mark.slow
def test_idle_fleet_uses_no_processor_time() -> None:
    async def work(llm: AsyncLLM) -> None:
        request = await llm.generate("abc", params(1))
        assert request.generated_text == llm.tokenizer.decode(request.generated_tokens)
        await until(lambda: num_is(llm, 0), "the engine is idle")
        before = [processor_seconds(pid) for pid in fleet_pids()]
        await asyncio.sleep(2)
        used = [processor_seconds(pid) - b for pid, b in zip(fleet_pids(), before, strict=True)]
        assert max(used) < 0.1, used

    with_fleet(1, work, tokenizer=LetterTokenizer())


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_stream_yields_pieces_of_streaming_interval() -> None:
    async def work(llm: AsyncLLM) -> None:
        for interval in (1, 5, 40):
            own = params(1, 200, streaming_interval=interval)
            *parts, request = [piece async for piece in llm.stream(prompt_of(9), own)]
            lengths = [len(part) for part in parts]
            assert [token for part in parts for token in part] == request.generated_tokens
            assert all(length >= interval for length in lengths[:-1])
            # Pieces that arrive together come together: how many depends on who is quicker.
            assert len(parts) >= 2

    with_fleet(1, work)


def test_shutdown_fails_pending_calls_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def collect(llm: AsyncLLM) -> None:
        async for _ in llm.stream(prompt_of(9), params(1, 400)):
            pass

    async def work() -> None:
        llm = AsyncLLM(directory(), None, CONFIG)
        try:
            # Uses at once, of one that nobody has started.
            tasks = [
                asyncio.ensure_future(llm.generate([prompt_of(9), prompt_of(3)], params(i, 400)))
                for i in range(3)
            ]
            tasks.append(asyncio.ensure_future(collect(llm)))
            await llm.pause()
            while len(llm.client.completion_futures) < 7:  # some are submitted after the pause
                await asyncio.sleep(0.01)
            assert [r.request_id for r in llm.client.completion_futures.values()] == list(range(7))
            abandoned = asyncio.ensure_future(llm.generate(prompt_of(9), params(0, 400)))
            await asyncio.sleep(0)
        finally:
            await asyncio.gather(llm.shutdown(), llm.shutdown())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineStateError] * 4
        assert {str(r) for r in results} == {"this AsyncLLM was shut down before the answer came"}
        await asyncio.wait([abandoned])
        del abandoned, tasks, results
        with pytest.raises(EngineStateError, match="make a new one"):
            await llm.generate(prompt_of(9))
        with pytest.raises(EngineStateError, match="make a new one"):
            await llm.update_weights(weights(1).state_dict())
        await llm.shutdown()

    asyncio.run(work())
    gc.collect()
    loud = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [text for text in loud if "never retrieved" in text]


@pytest.mark.slow
def test_async_llm_of_a_live_model_leaves_its_weights_alone() -> None:
    """Also where a model of ours is given, which an engine in this process would take as it is."""

    async def work() -> None:
        async with AsyncLLM(given, None, CONFIG, data_parallel_size=2) as llm:
            await llm.update_weights(weights(1).state_dict(), in_flight=True)
            requests = await llm.generate([prompt_of(9)] * 4, params(1))
            assert isinstance(requests, list)
            check_all(*requests)

    given = build_model(directory())
    assert isinstance(given, CausalLM)
    before = {name: tensor.clone() for name, tensor in given.read_weights().items()}
    asyncio.run(work())
    assert all(tensor.equal(before[name]) for name, tensor in given.read_weights().items())
    assert not any(tensor.is_shared() for tensor in given.read_weights().values())


def test_async_llm_that_cannot_start_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="use LLM"):
        AsyncLLM(directory(), use_coordinator=False)
    with pytest.raises(ConfigError, match="data_parallel_size=0"):
        AsyncLLM(directory(), None, CONFIG, data_parallel_size=0)
    with pytest.raises(ConfigError, match="does not exist"):
        AsyncLLM(directory(), None, CONFIG.replace(device="tpu"))


def test_async_llm_logs_a_slow_start_and_ends_at_start_timeout_s(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_processes, "REMIND_S", 0.01)
    # Without its arguments a child waits.
    monkeypatch.setattr(ChildProcess, "send", lambda *_: None)
    with pytest.raises(ConfigError, match=r"did not start within 0.5 s"):
        AsyncLLM(directory(), None, CONFIG, start_timeout_s=0.5)
    assert re.search(
        r"waiting for the start of the coordinator \(process \d+\), engine 0 \(process \d+\) since",
        caplog.text,
    )


def test_orphan_deadline_s_is_start_timeout_s_by_default() -> None:
    options = {"data_parallel_size": 1, "host": None, "port": None}
    for own, expected in (({}, 77.0), ({"limits": CoordinatorLimits(orphan_deadline_s=5)}, 5)):
        arguments = coordinator_arguments(CONFIG, own, orphan_deadline_s=77.0, **options)
        assert arguments["limits"].orphan_deadline_s == expected


def test_control_call_of_a_cancelled_caller_runs_to_its_end() -> None:
    async def work(llm: AsyncLLM) -> None:
        for method, state in (
            (llm.pause, EngineState.PAUSED),
            (llm.suspend, EngineState.SUSPENDED),
            (llm.resume, EngineState.PAUSED),
            (llm.unpause, EngineState.RUNNING),
        ):
            calling = asyncio.ensure_future(method())
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the command is sent
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await until(lambda: llm.state is state, "the call has its end")  # noqa: B023
            assert (await llm.stats()).state is state

    with_fleet(1, work)
