"""rollout.testing.FakeLLM does what LLM does: the same calls on both have the same outcomes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from rollout import (
    LLM,
    AsyncLLM,
    ConfigError,
    EngineStateError,
    InvalidRequestError,
    RolloutError,
    SamplingParams,
)
from rollout.control.commands import IncrementStaleness
from rollout.requests import DynamicInferenceRequest
from rollout.testing import Completion, FakeAsyncLLM, FakeLLM
from tests.tiny_models import prompt_of, tiny_model
from trainer_hooks import WeightSync, collate_rollouts, generation_phase

PROMPT = prompt_of(5)
PARAMS = SamplingParams(
    num_tokens_to_generate=6, ignore_eos=True, return_log_probs=True, logprobs_mode="temperature"
)
AnyLLM = LLM | FakeLLM


@cache
def weights(seed: int) -> Any:
    return tiny_model("qwen3", seed=seed)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(
        weights(0), block_size_tokens=8, max_sequence_length=64, buffer_size_gb=0.001, seed=0
    ) as llm:
        yield llm


@pytest.fixture
def fake() -> FakeLLM:
    return FakeLLM(lambda prompt, seed: [*range(9)])


def step(llm: AnyLLM) -> None:
    if isinstance(llm, FakeLLM):
        llm.step()
    else:
        llm._runtime.advance(None)  # type: ignore[union-attr]


def outcome(llm: AnyLLM, call: Callable[[Any], object]) -> tuple[str, str, str, int]:
    """Return the error of a call, if any, and the state and version after it."""
    try:
        call(llm)
        error: tuple[str, str] = ("", "")
    except RolloutError as raised:
        # What LLM says of a prompt names the vocabulary and the tokenizer of its model.
        says = "" if isinstance(raised, InvalidRequestError) else str(raised)
        error = (type(raised).__name__, says)
    return (*error, llm.state.name, llm.weights_version)


CALLS: dict[str, Callable[[Any], object]] = {
    "pause": lambda llm: llm.pause(),
    "unpause": lambda llm: llm.unpause(),
    "suspend": lambda llm: llm.suspend(),
    "suspend weights": lambda llm: llm.suspend(release=("weights", "kv_cache")),
    "suspend nonsense": lambda llm: llm.suspend(release=("cache",)),
    "suspend and discard": lambda llm: llm.suspend(discard_weights=True),
    "discard weights": lambda llm: llm.suspend(release=("weights",), discard_weights=True),
    "resume": lambda llm: llm.resume(),
    "resume nonsense": lambda llm: llm.resume(only="cache"),
    "resume weights": lambda llm: llm.resume(only="weights"),
    "update": lambda llm: llm.update_weights(weights(1)),
    "update in flight": lambda llm: llm.update_weights(weights(1), in_flight=True),
    "update backwards": lambda llm: llm.update_weights(weights(1), version=0, in_flight=True),
    "epoch": lambda llm: llm.set_generation_epoch(llm.weights_version + 2),
    "increment staleness": lambda llm: llm.do(IncrementStaleness()),
    "epoch backwards": lambda llm: llm.set_generation_epoch(0),
    "generate": lambda llm: llm.generate(PROMPT, PARAMS),
    "generate nothing": lambda llm: llm.generate([], PARAMS),
    "empty prompt": lambda llm: llm.submit([[]], PARAMS),
    "negative token": lambda llm: llm.generate([3, -1], PARAMS),
    "text": lambda llm: llm.generate("hello", PARAMS),
    "no samples": lambda llm: llm.generate(PROMPT, PARAMS, n=0),
    "collect": lambda llm: llm.collect(),
    "abort": lambda llm: llm.abort([99]),
}
WAYS = {
    "RUNNING": [],
    "PAUSED": ["pause"],
    "SUSPENDED": ["pause", "suspend"],
    "SUSPENDED without weights": ["pause", "suspend weights"],
    "SUSPENDED with weights alone": ["pause", "suspend weights", "resume weights"],
    "PAUSED with weights discarded": ["pause", "discard weights", "resume"],
}


@pytest.mark.parametrize("way", WAYS)
def test_fake_llm_allows_and_refuses_what_llm_does(way: str, llm: LLM, fake: FakeLLM) -> None:
    for name in CALLS:
        for each in (llm, fake):
            for before in WAYS[way]:
                CALLS[before](each)
        assert outcome(fake, CALLS[name]) == outcome(llm, CALLS[name]), name
        for each in (llm, fake):  # back to RUNNING
            each.pause() if each.state.name == "RUNNING" else each.resume()
            each.update_weights(weights(0))
            each.unpause()


def facts(request: DynamicInferenceRequest) -> dict[str, Any]:
    """Return what a trainer reads of a request."""
    return {
        "status": request.status,
        "finish_reason": request.finish_reason,
        "tokens": [len(request.prompt_tokens), request.num_generated_tokens],
        "weights_version": request.weights_version,
        "completed_at_version": request.completed_at_version,
        "policy_versions": request.policy_versions.tolist(),
        "policy_staleness": request.policy_staleness.tolist(),  # type: ignore[union-attr]
        "kv_cache_staleness": request.kv_cache_staleness.tolist(),  # type: ignore[union-attr]
        "context_kv_version_min": list(request.context_kv_version_min),
        "context_kv_version_mean": [round(mean, 9) for mean in request.context_kv_version_mean],
        "log_probs": tuple(torch.as_tensor(request.generated_log_probs).shape),
    }


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_fake_llm_stamps_tokens_and_kv_as_llm_does(mode: str, llm: LLM, fake: FakeLLM) -> None:
    found = []
    for each in (llm, fake):
        each.submit([PROMPT], PARAMS, n=2)
        step(each)
        each.update_weights(weights(1), in_flight=True)
        step(each)
        each.pause()
        each.suspend(mode)
        each.set_generation_epoch(5)
        each.resume()
        each.unpause()
        (group,) = each.collect()
        found.append([facts(request) for request in group.requests])
    assert found[1] == found[0]
    assert {0, 1, 5} == set(found[1][0]["policy_versions"])


def test_fake_llm_aborts_as_llm_does(llm: LLM, fake: FakeLLM) -> None:
    found = []
    for each in (llm, fake):
        group_ids = each.submit([PROMPT, PROMPT[:2]], PARAMS)
        step(each)
        (group,) = each.abort(group_ids[:1])
        assert [left.group_id for left in each.collect()] == group_ids[1:]
        found.append([facts(request) for request in group.requests])
    assert found[1] == found[0]


def test_script_gives_tokens_log_probs_and_failures() -> None:
    def script(prompt: list[int], seed: int) -> Completion:
        error = "no" if 3 in prompt else None
        return Completion(tokens=prompt * 2, logprobs=[-0.5] * 4, error=error)

    with FakeLLM(script) as llm:
        params = SamplingParams(return_log_probs=True)
        request, failed = llm.generate([[1, 2], [3, 4]], params)  # type: ignore[misc]
        assert request.generated_tokens == [1, 2, 1, 2]
        assert torch.as_tensor(request.generated_log_probs).tolist() == [-0.5] * 4
        assert failed.failed()
        assert (llm.stats().num_finished, llm.stats().num_failed) == (1, 1)


@pytest.mark.parametrize(("fake", "real"), [(FakeLLM, LLM), (FakeAsyncLLM, AsyncLLM)])
def test_methods_of_fake_llms_have_the_signatures_of_the_real_ones(fake: Any, real: Any) -> None:
    names = [name for name in vars(real) | vars(fake) if not name.startswith("_")]
    shared = [name for name in names if hasattr(real, name) and hasattr(fake, name)]
    methods = [name for name in shared if callable(getattr(real, name))]
    assert {"generate", "do", "update_weights"} <= {*methods, "generate"}
    # FakeAsyncLLM.shutdown has no fleet to leave running.
    for name in {*methods, "generate"} - ({"shutdown"} if fake is FakeAsyncLLM else set()):
        assert inspect.signature(getattr(fake, name)) == inspect.signature(getattr(real, name))


def test_fake_llm_refuses_what_needs_a_model_or_a_server(fake: FakeLLM) -> None:
    for call in (
        lambda: fake.engine,
        lambda: fake.serve(blocking=False),
        lambda: fake.use_weight_transport("shared"),
        fake.weights_checksum,
        fake.warm_up,
    ):
        with pytest.raises(ConfigError):
            call()


def test_a_training_step_runs_on_a_fake_llm(fake: FakeLLM) -> None:
    policy = torch.nn.Linear(2, 3)
    sync = WeightSync(fake)
    for version in (1, 2):
        with generation_phase(
            fake, sync, policy.named_parameters(), version=version, release=("kv_cache", "weights")
        ):
            requests = fake.generate([PROMPT, PROMPT], PARAMS)
        batch = collate_rollouts(requests, [0.0, 1.0], version)  # type: ignore[arg-type]
        assert batch.tokens_BT.shape == (2, 11)
        assert not batch.policy_lag_BT.any()
        assert fake.weights_version == version
        assert torch.equal(fake.weights["weight"], policy.weight)


def test_fake_async_llm_generates_across_an_update_while_others_wait(fake: FakeLLM) -> None:
    async def run() -> list[DynamicInferenceRequest]:
        async with FakeAsyncLLM(fake) as llm:
            requests = asyncio.create_task(llm.generate([PROMPT], PARAMS, n=3))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await llm.pause()
            await llm.suspend()
            await llm.set_generation_epoch(7)
            await llm.resume()
            await asyncio.sleep(0)
            assert not requests.done()
            await llm.unpause()
            return list(await requests)  # type: ignore[arg-type]

    for request in asyncio.run(run()):
        assert request.num_generated_tokens == 6
        assert set(request.policy_versions.tolist()) == {0, 7}


def test_fake_async_llm_aborts_requests_of_a_cancelled_caller_and_of_its_end(fake: FakeLLM) -> None:
    async def run() -> DynamicInferenceRequest:
        llm = FakeAsyncLLM(fake)
        await llm.pause()
        cancelled = asyncio.create_task(llm.generate(PROMPT, PARAMS))
        waiting = asyncio.create_task(llm.generate(PROMPT, PARAMS))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert fake.stats().num_running == 1
        await llm.shutdown()
        return await waiting  # type: ignore[return-value]

    assert asyncio.run(run()).finish_reason == "abort"


def test_requests_after_shutdown_are_refused_as_llm_does(llm: LLM, fake: FakeLLM) -> None:
    refusals = []
    for each in (llm, fake):
        each.shutdown()
        with pytest.raises(EngineStateError) as refusal:
            each.submit(PROMPT, PARAMS)
        refusals.append(str(refusal.value))
    assert refusals[1] == refusals[0]

    async def run() -> None:
        with pytest.raises(EngineStateError, match="STOPPED"):
            await asyncio.wait_for(FakeAsyncLLM(fake).generate(PROMPT, PARAMS), 5)

    asyncio.run(run())


def test_fake_llms_take_prompts_of_an_iterator_as_llm_does(llm: LLM, fake: FakeLLM) -> None:
    def prompts() -> Any:
        return iter([PROMPT, PROMPT[:2]])

    found = [
        llm.generate(prompts(), PARAMS),
        fake.generate(prompts(), PARAMS),
        asyncio.run(FakeAsyncLLM(fake).generate(prompts(), PARAMS)),
    ]
    for requests in found:
        assert [len(request.prompt_tokens) for request in requests] == [5, 2]  # type: ignore[union-attr]
