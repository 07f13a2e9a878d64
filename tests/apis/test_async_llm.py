"""AsyncLLM: a real coordinator, real engine processes, and their end."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollout import ConfigError, InferenceConfig, SamplingParams
from rollout.apis.async_llm import AsyncLLM
from rollout.requests.dynamic_request import DynamicInferenceRequest
from tests.tiny_models import Margins, prompt_of, randomize, tiny_model

CONFIG = InferenceConfig(block_size_tokens=8, max_sequence_length=512, buffer_size_gb=0.05)


@cache
def model() -> Any:
    return tiny_model("qwen3", seed=30)


@cache
def directory() -> str:
    """The same model for engine processes, which need no transformers to read it."""
    path = tempfile.mkdtemp(prefix="rollout-test-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    model().save_pretrained(path)
    return path


def params(seed: int, num_tokens: int = 20, **changes: Any) -> SamplingParams:
    return SamplingParams(
        num_tokens_to_generate=num_tokens, seed=seed, temperature=(0.0, 1.0)[seed % 2], **changes
    )


def with_fleet(size: int, work: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncLLM(directory(), None, CONFIG, data_parallel_size=size) as llm:
            await asyncio.wait_for(work(llm), 90)

    asyncio.run(run())


def assert_oracles(requests: list[DynamicInferenceRequest], trained: Any = None) -> None:
    margins = Margins()
    for request in requests:
        margins.compare_with_oracle(trained or model(), request)
    margins.check()


def is_alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_engines_give_the_trainers_models_tokens() -> None:
    async def work(llm: AsyncLLM) -> None:
        prompts = [prompt_of(n) for n in (1, 9, 30)]
        requests = await llm.generate(prompts, [params(i) for i in range(3)], n=2)
        assert isinstance(requests, list)
        assert [len(r.prompt_tokens) for r in requests] == [1, 1, 9, 9, 30, 30]
        assert_oracles(requests)
        single = await llm.generate(prompts[0], params(3))
        assert isinstance(single, DynamicInferenceRequest)
        assert await llm.generate([]) == []
        pids.extend(llm._fleet.pids)

    pids: list[int] = []
    with_fleet(2, work)
    assert len(pids) == 3
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_suspend_update_and_resume_under_load_lose_nothing(mode: str) -> None:
    async def work(llm: AsyncLLM) -> None:
        trained = tiny_model("qwen3", seed=30)
        tasks = [
            asyncio.ensure_future(llm.generate(prompt_of(9, seed=i), params(i, 200)))
            for i in range(6)
        ]
        for version in (1, 2):
            await asyncio.sleep(0.1)
            await llm.pause()
            await llm.suspend(mode)
            randomize(trained, seed=30)
            await llm.update_weights(trained.state_dict(), version)
            await llm.resume()
            await llm.unpause()
        requests = list(await asyncio.gather(*tasks))
        assert_oracles(requests)
        for request in requests:
            assert request.policy_versions.tolist() == sorted(request.policy_versions.tolist())
            assert len(request.generated_tokens) == 200
        assert {r.completed_at_version for r in requests} <= {0, 1, 2}
        later = await llm.generate(prompt_of(4), params(1))
        assert set(later.policy_versions.tolist()) == {2}

    with_fleet(2, work)


def test_a_killed_engines_requests_finish_on_the_others() -> None:
    async def work(llm: AsyncLLM) -> None:
        tasks = [
            asyncio.ensure_future(llm.generate(prompt_of(9, seed=i), params(i, 300)))
            for i in range(8)
        ]
        await asyncio.sleep(0.3)
        os.kill(llm._fleet.pids[1], signal.SIGKILL)
        requests = list(await asyncio.gather(*tasks))
        assert [len(r.generated_tokens) for r in requests] == [300] * 8
        assert_oracles(requests)

    with_fleet(2, work)


def test_tokens_stream_as_they_come() -> None:
    async def work(llm: AsyncLLM) -> None:
        pieces = [piece async for piece in llm.stream(prompt_of(9), params(1, 40))]
        *parts, request = pieces
        assert isinstance(request, DynamicInferenceRequest)
        told = [token for part in parts for token in part]
        assert told == request.generated_tokens[: len(told)]
        assert len(parts) > 1
        assert_oracles([request])

    with_fleet(1, work)


def test_what_cannot_start_says_why_and_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="use LLM"):
        AsyncLLM(directory(), use_coordinator=False)
    with pytest.raises(ConfigError, match="data_parallel_size=0"):
        AsyncLLM(directory(), None, CONFIG, data_parallel_size=0)
    with pytest.raises(ConfigError, match="does not exist"):
        AsyncLLM(directory(), None, CONFIG.replace(device="tpu"))


def test_an_exception_inside_ends_all_processes() -> None:
    async def fail(llm: AsyncLLM) -> None:
        pids.extend(llm._fleet.pids)
        running = asyncio.ensure_future(llm.generate(prompt_of(9), params(1, 400)))
        await asyncio.sleep(0.05)
        assert not running.done()
        raise ZeroDivisionError

    pids: list[int] = []
    with pytest.raises(ZeroDivisionError):
        with_fleet(1, fail)
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("interval", [1, 5, 40])
def test_a_stream_comes_in_pieces_of_the_interval(interval: int) -> None:
    async def work(llm: AsyncLLM) -> None:
        own = params(1, 60, streaming_interval=interval)
        *parts, request = [piece async for piece in llm.stream(prompt_of(9), own)]
        lengths = [len(part) for part in parts]
        assert [token for part in parts for token in part] == request.generated_tokens
        assert all(n >= interval for n in lengths[:-1])
        # Pieces that arrive together come together.
        assert len(parts) >= {1: 30, 5: 6, 40: 2}[interval]

    with_fleet(1, work)
