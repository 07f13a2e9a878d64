"""Behaviour of every kind of LLM: over an engine of this process, and over a fleet of two."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from rollout import (
    LLM,
    AsyncLLM,
    DynamicInferenceEngine,
    EngineState,
    EngineStateError,
    InferenceConfig,
    InvalidRequestError,
    SamplingParams,
    Status,
    WeightUpdateError,
)
from rollout.apis.threaded_llm import ThreadedLLM
from tests.apis.any_llm import AnyLLM, CoroutinesLLM, ThreadsLLM
from tests.apis.provenance_oracle import check_provenance
from tests.engine.dense_model import DenseModel
from tests.engine.test_parity import greedy, transformers_tokens
from tests.lora_adapters import linear_modules, merged, random_adapter
from tests.tiny_models import BLOCK_SIZE, VOCAB_SIZE, Margins, prompt_of, tiny_model

CONFIG = InferenceConfig(
    block_size_tokens=BLOCK_SIZE, max_sequence_length=512, buffer_size_gb=0.02, num_threads=1
)
LENGTHS = (1, 7, 8, 9, 33, 100)
KINDS = ("LLM", "LLM over a fleet", "AsyncLLM", "ThreadedLLM")
MODES = ("persist", "offload", "recompute")


@cache
def weights(version: int) -> Any:
    """A model for each version; versions are those that the fixture's LLM went through."""
    return tiny_model("qwen3", seed=60 + version)


@cache
def dense(version: int) -> DenseModel:
    return DenseModel(weights(version))


@cache
def directory() -> str:
    """The first one, for engine processes, which need no transformers to read it."""
    path = tempfile.mkdtemp(prefix="rollout-test-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    weights(0).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=KINDS)
def llm(request: pytest.FixtureRequest) -> Iterator[AnyLLM]:
    """One LLM for all tests of a kind. Each test leaves it running and idle."""
    fleet: dict[str, Any] = {"inference_config": CONFIG, "data_parallel_size": 2}
    made: ThreadsLLM | CoroutinesLLM
    with ExitStack() as stack:
        if request.param == "AsyncLLM":
            made = CoroutinesLLM(partial(AsyncLLM, directory(), **fleet))
        elif request.param == "LLM over a fleet":
            made = ThreadsLLM(LLM(directory(), use_coordinator=True, **fleet))
        else:
            own = stack.enter_context(LLM(directory(), inference_config=CONFIG))
            is_awaited = request.param == "ThreadedLLM"
            made = CoroutinesLLM(partial(ThreadedLLM, own)) if is_awaited else ThreadsLLM(own)
        stack.callback(made.close)
        yield made


def sampled(seed: int, num_tokens: int = 24, **changes: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, seed=seed, **changes)


def version_of(llm: AnyLLM) -> int:
    return llm.llm.weights_version


def next_weights(llm: AnyLLM, **how: Any) -> Any:
    version = version_of(llm) + 1
    return llm.call("update_weights", weights(version).state_dict(), **how)


def test_weights_checksum_is_that_of_the_served_weights(llm: AnyLLM) -> None:
    def expected() -> str:
        served = weights(version_of(llm))
        return DynamicInferenceEngine.from_model(served, CONFIG).weights_checksum()

    assert llm.call("weights_checksum") == expected()
    next_weights(llm, in_flight=True)
    assert llm.call("weights_checksum") == expected()


def test_generate_gives_the_greedy_tokens_of_transformers_generate(llm: AnyLLM) -> None:
    model, margins = weights(version_of(llm)), Margins()
    prompts = [prompt_of(n) for n in LENGTHS]
    requests = llm.call("generate", prompts, greedy(32))
    expected = transformers_tokens(model, prompts, 32)
    for request, tokens in zip(requests, expected, strict=True):
        margins.compare(model, request, tokens)
    margins.check()
    assert margins.num_tokens >= 0.9 * len(prompts) * 32


def test_generate_samples_from_the_trainers_model_by_the_seed(llm: AnyLLM) -> None:
    margins, prompts = Margins(), [prompt_of(n, seed=1) for n in LENGTHS]
    requests = llm.call("generate", prompts, sampled(5, top_p=0.9, return_log_probs=True), n=3)
    assert [len(r.prompt_tokens) for r in requests] == [n for n in LENGTHS for _ in range(3)]
    assert len({r.seed for r in requests}) == len(requests)
    for request in requests:
        margins.compare_with_oracle(weights(version_of(llm)), request)
        assert request.status is Status.COMPLETED
        assert request.succeeded()
        assert len(request.generated_log_probs) == 24
    margins.check()


def test_on_finished_of_an_awaited_generate_is_called_once_per_sample(llm: AnyLLM) -> None:
    if isinstance(llm, ThreadsLLM):
        pytest.skip("LLM.generate returns after the last sample")
    ends: list[str] = []
    prompts = [prompt_of(3), [VOCAB_SIZE + 1] if isinstance(llm.llm, AsyncLLM) else prompt_of(4)]
    llm.call(
        "generate", prompts, sampled(1, num_tokens=4), n=2, on_finished=lambda: ends.append("one")
    )
    assert len(ends) == 4, "failed ones too"


def test_generate_prefills_the_prompt_of_a_group_once(llm: AnyLLM) -> None:
    before = llm.call("stats")
    llm.call("generate", [prompt_of(40, seed=2), prompt_of(33, seed=2)], sampled(1), n=8)
    after = llm.call("stats")
    assert after.num_prefill_tokens - before.num_prefill_tokens == 40 + 33
    assert after.num_forked_requests - before.num_forked_requests == 2 * 7


@pytest.mark.drawn(3)
@pytest.mark.parametrize("mode", MODES)
def test_requests_go_on_through_suspend_update_weights_and_resume(llm: AnyLLM, mode: str) -> None:
    first = version_of(llm)
    begun = llm.begin([prompt_of(n, seed=3) for n in (9, 17)], sampled(7, 160), n=3)
    for version in (first + 1, first + 2):
        llm.call("pause")
        report = llm.call("suspend", mode)
        assert llm.llm.state is EngineState.SUSPENDED
        assert (report.mode, next_weights(llm).version) == (mode, version)
        llm.call("resume")
        llm.call("unpause")
        assert (llm.llm.state, version_of(llm)) == (EngineState.RUNNING, version)
    requests, margins = llm.finish(begun), Margins()
    models = {version: dense(version) for version in range(first, first + 3)}
    for request in requests:
        versions = request.policy_versions
        assert versions.tolist() == sorted(versions.tolist())
        assert len(request.generated_tokens) == 160
        check_provenance(models, request, margins)
        last = int(versions[-1])
        policy, kv = request.staleness_at(last)
        assert policy[-160:].tolist() == (last - versions).tolist()
        # The last token was never read, so nothing wrote its KV before the end.
        written = torch.as_tensor(request.kv_spans.to_array().tolist())
        assert kv.tolist() == (last - written).clamp(min=0).tolist()
        if mode == "recompute":
            assert list(request.context_kv_version_min) == versions.tolist()
    margins.check()
    assert margins.num_tokens == 6 * 160


def test_requests_go_on_through_update_weights_in_flight(llm: AnyLLM) -> None:
    first = version_of(llm)
    begun = llm.begin([prompt_of(n, seed=4) for n in (9, 17)], sampled(9, 160), n=3)
    for _ in range(2):
        report = next_weights(llm, in_flight=True)
        # From the end of the step before, so perhaps above `seconds`.
        assert report.stall_seconds > 0
    requests, margins = llm.finish(begun), Margins()
    models = {version: dense(version) for version in range(first, first + 3)}
    for request in requests:
        check_provenance(models, request, margins)
    margins.check()


def test_refused_update_weights_leaves_weights_and_version(llm: AnyLLM) -> None:
    version, state = version_of(llm), weights(version_of(llm)).state_dict()
    llm.call("pause")
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {**state, name: torch.full_like(state[name], torch.nan)}
    with pytest.raises(WeightUpdateError, match=name):
        llm.call("update_weights", bad)
    with pytest.raises(WeightUpdateError, match=name):
        llm.call("update_weights", {n: t for n, t in state.items() if n != name})
    with pytest.raises(WeightUpdateError, match=f"version={version} "):
        llm.call("update_weights", state, version)
    llm.call("unpause")
    assert version_of(llm) == version
    (request,), margins = llm.call("generate", [prompt_of(9)], sampled(11)), Margins()
    margins.compare_with_oracle(weights(version), request)
    margins.check()


def test_update_weights_merges_an_adapter_into_the_served_weights(llm: AnyLLM) -> None:
    """Adapter, another, and the full weights again: each as the engine in process serves it."""
    next_weights(llm, in_flight=True)
    base = {n: p.detach() for n, p in weights(version_of(llm)).named_parameters()}
    engine = DynamicInferenceEngine.from_model(weights(version_of(llm)), CONFIG)
    for seed in (1, 2):
        adapter = random_adapter(base, linear_modules(base)[seed:], seed=seed, rank=4)
        report = llm.call("update_weights", adapter, in_flight=True)
        expected = engine.update_weights(merged(base, adapter), in_flight=True)
        assert report.checksum == llm.call("weights_checksum") == expected.checksum
        assert report.num_bytes < expected.num_bytes
    assert llm.call("stats").lora_base_bytes > 0
    version, bad = version_of(llm), replace(adapter, rank=5)
    with pytest.raises(WeightUpdateError, match="with rank 5 is expected"):
        llm.call("update_weights", bad, in_flight=True)
    assert version_of(llm) == version
    next_weights(llm, in_flight=True)
    assert llm.call("stats").lora_base_bytes == 0


def test_second_suspend_releases_another_resource_and_a_third_nothing(
    llm: AnyLLM,
) -> None:
    begun = llm.begin([prompt_of(9, seed=3)], sampled(7, 60), n=2)
    llm.call("pause")
    assert llm.call("suspend", "offload").released_by_owner.get("weights", 0) == 0
    assert llm.call("suspend", "offload", ("weights",)).released_by_owner["weights"] > 0
    assert llm.call("suspend", "offload", ("weights",)).bytes_released == 0
    assert llm.call("resume", "kv_cache").bytes_restored >= 0
    assert llm.llm.state is EngineState.SUSPENDED
    assert llm.call("resume").restored_by_owner["weights"] > 0
    assert llm.llm.state is EngineState.PAUSED
    llm.call("unpause")
    assert [len(request.generated_tokens) for request in llm.finish(begun)] == [60, 60]


def test_illegal_commands_are_refused_with_the_state_and_the_legal_ones(llm: AnyLLM) -> None:
    with pytest.raises(EngineStateError, match=r"RUNNING.*legal.*pause"):
        llm.call("suspend")
    with pytest.raises(EngineStateError, match="RUNNING"):
        llm.call("update_weights", weights(version_of(llm)).state_dict())
    llm.call("pause")
    llm.call("pause")  # already there
    llm.call("unpause")
    assert llm.llm.state is EngineState.RUNNING


def test_generate_refuses_a_malformed_prompt_and_fails_an_impossible_one(llm: AnyLLM) -> None:
    for prompt in ("text without a tokenizer", [1, "two"], [1.5], 5):
        with pytest.raises(InvalidRequestError):
            llm.call("generate", [prompt_of(3), prompt], sampled(1))
    good, long = llm.call("generate", [prompt_of(3), prompt_of(600)], sampled(1))
    assert (good.status, good.finish_reason) == (Status.COMPLETED, "length")
    assert (long.status, long.finish_reason) == (Status.FAILED, "error")
    assert long.generated_tokens == []
    assert llm.call("generate", []) == []
    assert VOCAB_SIZE not in good.generated_tokens


def test_stats_count_what_all_engines_did(llm: AnyLLM) -> None:
    before = llm.call("stats")
    llm.call("generate", [prompt_of(n) for n in (3, 4, 5, 6)], sampled(2))
    after = llm.call("stats")
    assert after.num_finished - before.num_finished == 4
    assert after.num_sampled_tokens - before.num_sampled_tokens == 4 * 24
    assert after.weights_version == version_of(llm)
    assert after.state is EngineState.RUNNING
