"""Suspend and resume without an update change no result of a request."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from numpy.testing import assert_allclose

from rollout import (
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    EngineState,
    SamplingParams,
)
from tests.tiny_models import (
    IS_LONG,
    Finished,
    Margins,
    drain,
    generate_all,
    prompt_of,
    tiny_engine,
    tiny_model,
)

MODES = ("persist", "offload", "recompute")
KINDS = ("device", "reserved")
NUM_REQUESTS = 60 if IS_LONG else 10


@cache
def model() -> Any:
    return tiny_model("llama", seed=4)


@cache
def jobs() -> tuple[tuple[list[int], SamplingParams], ...]:
    chooser = random.Random(2)
    return tuple(
        (
            prompt_of(chooser.choice((1, 8, 9, 30, 70)), seed=i),
            SamplingParams(
                num_tokens_to_generate=chooser.randint(12, 30),
                seed=i,
                temperature=(0.0, 1.0)[i % 2],
                top_p=(0.0, 0.0, 0.9)[i % 3],
                return_log_probs=True,
                skip_prompt_log_probs=i % 4 > 0,
                top_n_logprobs=i % 3,
            ),
        )
        for i in range(NUM_REQUESTS)
    )


@cache
def undisturbed() -> tuple[DynamicInferenceRequest, ...]:
    return tuple(generate_all(tiny_engine(model()), jobs()))


def suspend_and_resume(engine: DynamicInferenceEngine, mode: str | None = None) -> None:
    """Suspend and resume, checked before, during and after."""
    before, pointers = engine.stats(), engine.kv_data_ptrs()
    engine.pause()
    report = engine.suspend(mode)
    during = engine.stats()
    assert during.state is EngineState.SUSPENDED
    in_context = before.num_running + before.num_paused
    if report.mode == "recompute":
        assert during.num_blocks_used == during.num_running + during.num_paused == 0
        assert during.num_waiting == before.num_waiting + in_context
        assert report.num_requests_requeued == in_context
    else:
        assert during.num_blocks_used == before.num_blocks_used
        assert during.num_running + during.num_paused == in_context
        assert report.num_requests_requeued == 0
    is_kept = report.mode == "persist"
    assert (report.kept_by_owner["kv_cache"] > 0) == is_kept == (report.bytes_released == 0)
    assert (report.bytes_on_host > 0) == (report.mode == "offload" and before.num_blocks_used > 0)
    resumed = engine.resume()
    assert engine.state is EngineState.PAUSED
    assert resumed.num_requests_recomputed == report.num_requests_requeued
    if report.mode == "offload":
        assert resumed.bytes_restored == report.bytes_on_host
    assert engine.kv_data_ptrs().keys() == pointers.keys()
    engine.unpause()


def test_stats_add_up_what_suspends_release_and_resumes_restore() -> None:
    engine = tiny_engine(model(), kv_cache_management_mode="offload")
    for prompt, params in jobs():
        engine.add_request(prompt, params)
    released = restored = 0
    for _ in range(2):
        engine.step()
        engine.pause()
        released += engine.suspend().bytes_released
        restored += engine.resume().bytes_restored
        engine.unpause()
    stats = engine.stats()
    assert (stats.suspended_bytes, stats.resumed_bytes) == (released, restored)
    assert restored > 0


def disturbed(engine: DynamicInferenceEngine, every: int) -> list[DynamicInferenceRequest]:
    """Run all jobs, with a suspend and resume after every `every` steps."""
    ids = [engine.add_request(prompt, params) for prompt, params in jobs()]
    finished: Finished = {}
    for step in range(1, 5_000):
        finished |= {record.request_id: record.merge() for record in engine.step()}
        if not engine.has_unfinished_requests():
            return [finished[i] for i in ids]
        # Once more than `every` steps in sequence, so that requests also progress between cycles.
        if step % every == 0:
            suspend_and_resume(engine)
    raise AssertionError(f"no progress: {engine.stats()}")


def assert_undisturbed(results: list[DynamicInferenceRequest]) -> None:
    margins = Margins()
    for result, reference in zip(results, undisturbed(), strict=True):
        if not margins.compare(model(), result, reference.generated_tokens):
            continue
        assert_allclose(result.generated_log_probs, reference.generated_log_probs, atol=1e-4)
        assert (result.prompt_log_probs is None) == (reference.prompt_log_probs is None)
        if reference.prompt_log_probs is not None:
            assert_allclose(result.prompt_log_probs, reference.prompt_log_probs, atol=1e-4)
        assert_same_top_n(result.generated_top_n_logprobs, reference.generated_top_n_logprobs)
        assert_same_top_n(result.prompt_top_n_logprobs, reference.prompt_top_n_logprobs)
        assert result.policy_staleness.tolist() == [0] * len(result.policy_staleness)
        assert result.kv_cache_staleness.tolist() == [0] * len(result.kv_cache_staleness)
        assert len(result.context_kv_version_mean) == len(result.generated_tokens)
        assert len(result.tpot) == len(result.generated_tokens)
    margins.check()
    assert margins.num_tokens > 12 * NUM_REQUESTS


def assert_same_top_n(given: list[dict[int, float]] | None, expected: list | None) -> None:
    assert (given is None) == (expected is None)
    for best, wanted in zip(given or [], expected or [], strict=True):
        assert_allclose(sorted(best.values()), sorted(wanted.values()), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_cycles_mid_generation_keep_tokens_and_logprobs(mode: str, kind: str) -> None:
    engine = tiny_engine(model(), kv_cache_management_mode=mode, memory_kind=kind)
    assert_undisturbed(disturbed(engine, every=5))
    assert engine.stats().num_suspends > 3


@pytest.mark.parametrize("mode", MODES)
def test_cycles_mid_prefill_keep_tokens_and_logprobs(mode: str) -> None:
    """A prompt of 70 tokens in chunks of at most 25 is cut by a cycle every fourth step."""
    engine = tiny_engine(
        model(), kv_cache_management_mode=mode, enable_chunked_prefill=True, max_tokens=25
    )
    assert_undisturbed(disturbed(engine, every=4))


@pytest.mark.parametrize("mode", MODES)
def test_cycles_with_paused_and_evicted_requests_keep_tokens_and_logprobs(mode: str) -> None:
    engine = tiny_engine(
        model(), kv_cache_management_mode=mode, num_blocks=16, paused_buffer_size_gb=1.0
    )
    assert_undisturbed(disturbed(engine, every=5))
    assert engine.stats().num_evictions + engine.stats().num_pauses > 0


def test_the_mode_of_each_suspend_may_differ_from_the_configs() -> None:
    engine = tiny_engine(model())
    ids = [engine.add_request(prompt, params) for prompt, params in jobs()]
    finished: Finished = {}
    for mode in MODES * 2:
        finished |= {record.request_id: record.merge() for record in engine.step()}
        suspend_and_resume(engine, mode)
    finished |= drain(engine)
    assert_undisturbed([finished[i] for i in ids])


@pytest.mark.parametrize("mode", MODES)
def test_groups_survive_suspend_cycles(mode: str) -> None:
    params = [SamplingParams(num_tokens_to_generate=20, seed=i) for i in range(6)]
    prompt, margins = prompt_of(21), Margins()
    singles = generate_all(tiny_engine(model()), [(prompt, p) for p in params])
    engine = tiny_engine(model(), kv_cache_management_mode=mode)
    ids, finished = engine.add_group(prompt, params), {}
    for cycle in range(6):
        suspend_and_resume(engine)  # the first one before anything was prefilled
        for _ in range(cycle):
            finished |= {record.request_id: record.merge() for record in engine.step()}
    finished |= drain(engine)
    for i, single in zip(ids, singles, strict=True):
        margins.compare(model(), finished[i], single.generated_tokens)
    margins.check()


@pytest.mark.parametrize("mode", MODES)
def test_static_pointers_stay_through_suspend_update_and_resume(mode: str) -> None:
    engine = tiny_engine(model(), kv_cache_management_mode=mode, static_kv_memory_pointers=True)
    pointers = engine.kv_data_ptrs()
    assert len(pointers) == len(set(pointers.values())) == 2
    engine.add_request(prompt_of(20), SamplingParams(num_tokens_to_generate=8, seed=1))
    for _ in range(3):
        engine.step()
        engine.pause()
        engine.suspend()
        ballast = [bytearray(2**20) for _ in range(8)]  # takes released addresses
        engine.update_weights(dict(model().named_parameters()))
        engine.resume()
        engine.unpause()
        assert engine.kv_data_ptrs() == pointers
        del ballast
    drain(engine)


@pytest.mark.parametrize("mode", MODES)
def test_suspend_and_resume_of_an_idle_engine(mode: str) -> None:
    engine = tiny_engine(model(), kv_cache_management_mode=mode)
    suspend_and_resume(engine)
    (result,) = generate_all(engine, [jobs()[0]])
    margins = Margins()
    margins.compare(model(), result, undisturbed()[0].generated_tokens)
    margins.check()
    assert engine.stats().num_suspends == 1


def test_a_repeated_suspend_or_resume_reports_zero_bytes() -> None:
    engine = tiny_engine(model(), kv_cache_management_mode="offload")
    engine.pause()
    assert engine.suspend().bytes_released > 0
    assert engine.suspend().bytes_released == 0
    assert engine.resume().bytes_restored == 0
    assert engine.resume().num_requests_recomputed == 0
    assert engine.stats().num_suspends == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_suspend_while_suspended_releases_what_is_not_released_yet(mode: str) -> None:
    engine = tiny_engine(model(), kv_cache_management_mode=mode)
    ids = [engine.add_request(*job) for job in jobs()]
    for _ in range(4):
        engine.step()
    engine.pause()
    num_bytes = engine.memory_status().resident_bytes["weights"]
    first = engine.suspend()
    second = engine.suspend(release=("kv_cache", "weights"))
    repeated = engine.suspend(release=("weights", "kv_cache"))
    assert second.released_by_owner == {"kv_cache": 0, "weights": num_bytes}
    assert second.bytes_on_host == first.bytes_on_host + num_bytes
    assert second.kept_by_owner == {**first.kept_by_owner, "weights": 0}
    assert repeated.bytes_released == repeated.num_requests_requeued == 0
    assert engine.resume("weights").bytes_restored == num_bytes
    assert engine.state is EngineState.SUSPENDED
    assert engine.suspend(release=("weights",)).bytes_released == num_bytes
    resumed = engine.resume()
    assert engine.state is EngineState.PAUSED
    assert resumed.num_requests_recomputed == first.num_requests_requeued
    engine.unpause()
    finished = drain(engine)
    for i, expected in zip(ids, undisturbed(), strict=True):
        Margins().compare(model(), finished[i], expected.generated_tokens)


POOL_GB = 0.25


@pytest.mark.parametrize("kind", ["device", "reserved"])
def test_suspend_reports_resident_bytes_released(kind: str) -> None:
    engine = tiny_engine(model(), buffer_size_gb=POOL_GB, memory_kind=kind)
    generate_all(engine, jobs())
    engine.pause()
    report = engine.suspend("offload")
    assert report.bytes_released > 0.9 * POOL_GB * 2**30
    assert 0 < report.resident_bytes_released < 0.1 * report.bytes_released
    assert engine.suspend(release=("weights",)).resident_bytes_released > 0
    engine.resume()
    assert engine.suspend("persist").resident_bytes_released == 0


@pytest.mark.parametrize("lru", [False, True])
def test_fifty_cycles_of_the_same_load_touch_no_more_memory_than_one(lru: bool) -> None:
    fields: dict[str, Any] = {"enable_prefix_caching": True}
    if lru:
        fields["prefix_caching_eviction_policy"] = "lru"
    resident = []
    for num_cycles in (1, 50):
        engine = tiny_engine(model(), buffer_size_gb=POOL_GB, **fields)
        for cycle in range(num_cycles):
            prompts = [prompt_of(40, seed=10 * cycle + i) for i in range(4)]
            generate_all(engine, [(prompt, jobs()[0][1]) for prompt in prompts])
            engine.pause()
            engine.suspend("persist")
            engine.set_generation_epoch(cycle + 1)
            engine.resume()
            engine.unpause()
        engine.pause()
        resident.append(engine.suspend("recompute").resident_bytes_released)
    assert resident[1] <= 1.05 * resident[0]


def test_kv_left_by_a_persist_suspend_is_released_by_another_mode() -> None:
    engine = tiny_engine(model(), kv_cache_management_mode="persist")
    engine.add_request(*jobs()[0])
    engine.step()
    engine.pause()
    num_bytes = engine.memory_status().resident_bytes["kv_cache"]
    assert engine.suspend().bytes_released == 0
    report = engine.suspend("offload")
    assert (report.mode, report.bytes_released) == ("offload", num_bytes)
    assert engine.suspend("recompute").bytes_released == 0
    engine.resume()
    engine.unpause()
    assert drain(engine)[0].generated_tokens == undisturbed()[0].generated_tokens


@pytest.mark.parametrize("mode", MODES)
def test_requests_added_while_suspended_queue_behind_the_older_ones(mode: str) -> None:
    engine = tiny_engine(model(), kv_cache_management_mode=mode, max_requests=1)
    first = [engine.add_request(prompt_of(9), jobs()[0][1]) for _ in range(2)]
    engine.step()
    engine.pause()
    paused = engine.add_request(prompt_of(9), jobs()[0][1])
    engine.suspend()
    suspended = engine.add_request(prompt_of(9), jobs()[0][1])
    engine.resume()
    engine.unpause()
    assert list(drain(engine)) == [*first, paused, suspended]
