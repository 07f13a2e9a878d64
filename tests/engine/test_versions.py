"""The versions that sampled each token, wrote its KV, and wrote its context."""

from __future__ import annotations

from typing import Any

import pytest

from rollout import (
    DynamicInferenceEngine,
    DynamicInferenceRequest,
    EngineState,
    EngineStateError,
    SamplingParams,
    WeightUpdateError,
)
from tests.tiny_models import drain, prompt_of, tiny_engine, tiny_model

PROMPT = prompt_of(8)


def params(num_tokens: int = 8, **changes: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=num_tokens, seed=3, **changes)


def steps(engine: DynamicInferenceEngine, count: int) -> list[DynamicInferenceRequest]:
    return [record.merge() for _ in range(count) for record in engine.step()]


def bump(engine: DynamicInferenceEngine, how: str) -> None:
    """Set the next version: while paused, through a suspend, or in flight."""
    tensors = dict(tiny_model(seed=50 + engine.weights_version).named_parameters())
    if how == "in_flight":
        engine.update_weights(tensors, in_flight=True)
        return
    engine.pause()
    if how == "epoch":
        engine.set_generation_epoch(engine.weights_version + 1)
    elif how == "paused":
        engine.update_weights(tensors)
    else:
        engine.suspend(how)
        engine.update_weights(tensors)
        engine.resume()
    engine.unpause()


def three_versions(how: str, **config: Any) -> DynamicInferenceRequest:
    """Prompt 8, then 3 tokens, update, 3 tokens, update, 2 tokens."""
    engine = tiny_engine(tiny_model(), **config)
    engine.add_request(PROMPT, params())
    assert not steps(engine, 3)
    bump(engine, how)
    assert not steps(engine, 3)
    bump(engine, how)
    (request,) = steps(engine, 2)
    assert len(request.generated_tokens) == 8
    return request


KEEPING = [
    ("persist", {}),
    ("offload", {}),
    ("epoch", {}),
    ("paused", {}),
    ("in_flight", {}),
    ("in_flight", {"kv_cache_management_mode": "recompute"}),
    ("paused", {"kv_cache_management_mode": "recompute"}),
]


@pytest.mark.parametrize(("how", "config"), KEEPING)
def test_versions_of_a_request_whose_kv_is_kept(how: str, config: dict[str, Any]) -> None:
    request = three_versions(how, **config)
    assert request.policy_staleness.tolist() == [2] * 11 + [1] * 3 + [0] * 2
    assert request.kv_cache_staleness.tolist() == [2] * 10 + [1] * 3 + [0] * 3
    assert request.policy_versions.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert request.context_kv_version_min == [0] * 8
    means = [0, 0, 0, 1 / 11, 2 / 12, 3 / 13, 5 / 14, 7 / 15]
    assert request.context_kv_version_mean == pytest.approx(means)
    assert request.completed_at_version == 2


def test_versions_of_a_request_whose_kv_is_recomputed() -> None:
    request = three_versions("recompute")
    assert request.policy_staleness.tolist() == [2] * 11 + [1] * 3 + [0] * 2
    assert request.kv_cache_staleness.tolist() == [0] * 16
    assert request.context_kv_version_min == [0, 0, 0, 1, 1, 1, 2, 2]
    assert request.context_kv_version_mean == [0, 0, 0, 1, 1, 1, 2, 2]
    assert request.policy_staleness.dtype == request.kv_cache_staleness.dtype
    assert str(request.policy_staleness.dtype) == "torch.int32"


@pytest.mark.parametrize(("how", "kv"), [("persist", (3, 3, 2)), ("recompute", (8, 0, 0))])
def test_stats_count_generated_tokens_by_their_age(how: str, kv: tuple[int, ...]) -> None:
    """The reference numbers, and beside them a request that has only just begun."""
    engine = tiny_engine(tiny_model())
    engine.add_request(PROMPT, params())
    for count in (3, 3):
        steps(engine, count)
        bump(engine, how)
    engine.add_request(PROMPT[:3], SamplingParams(num_tokens_to_generate=40))
    assert sum(engine.stats().policy_staleness) == engine.stats().num_prompt_tokens == 0
    assert len(steps(engine, 3)) == 1
    stats = engine.stats()
    assert stats.policy_staleness == (2, 3, 3, 0, 0, 0, 0, 0, 0)
    assert stats.kv_staleness == (*kv, 0, 0, 0, 0, 0, 0)
    assert stats.num_prompt_tokens == 8
    engine.abort_request(1)
    assert engine.stats().policy_staleness[0] > 2
    assert engine.stats().num_prompt_tokens == 11


def test_stats_count_all_tokens_older_than_seven_versions_together() -> None:
    engine = tiny_engine(tiny_model())
    engine.add_request(PROMPT, params())
    steps(engine, 1)
    engine.pause()
    engine.set_generation_epoch(1000)
    engine.unpause()
    steps(engine, 7)
    assert engine.stats().policy_staleness == (7, 0, 0, 0, 0, 0, 0, 0, 1)


def test_staleness_of_a_finished_request_grows_only_in_staleness_at() -> None:
    request = three_versions("persist")
    policy, kv = request.staleness_at(7)
    assert policy.tolist() == [7] * 11 + [6] * 3 + [5] * 2
    assert kv.tolist() == [7] * 10 + [6] * 3 + [5] * 3
    assert request.policy_staleness.max() == 2


def test_the_record_of_a_running_request_ages_with_the_engine() -> None:
    engine = tiny_engine(tiny_model())
    request_id = engine.add_request(PROMPT, params())
    steps(engine, 3)
    bump(engine, "in_flight")
    record = engine.get_record(request_id).merge()
    assert record.policy_staleness.tolist() == [1] * 11
    # The third token's KV is not written yet: it reads as the current version.
    assert record.kv_cache_staleness.tolist() == [1] * 10 + [0]
    bump(engine, "in_flight")
    assert engine.get_record(request_id).merge().policy_staleness.tolist() == [2] * 11


def test_a_request_that_entered_later_has_a_prompt_of_its_own_version() -> None:
    engine = tiny_engine(tiny_model(), weights_version=5)
    assert engine.weights_version == 5
    bump(engine, "in_flight")
    engine.add_request(PROMPT, params(2))
    bump(engine, "in_flight")
    (request,) = steps(engine, 2)
    assert request.policy_staleness.tolist() == [1] * 8 + [0] * 2  # entered at 6, sampled at 7
    assert request.kv_cache_staleness.tolist() == [0] * 10
    assert request.completed_at_version == 7


def test_members_of_a_group_share_the_kv_versions_of_their_prompt() -> None:
    engine = tiny_engine(tiny_model())
    engine.add_group(PROMPT, [params(4)] * 3)
    steps(engine, 2)
    bump(engine, "in_flight")
    for request in steps(engine, 2):
        assert request.kv_cache_staleness.tolist() == [1] * 9 + [0] * 3
        assert request.policy_staleness.tolist() == [1] * 10 + [0] * 2
        assert request.context_kv_version_mean == pytest.approx([0, 0, 1 / 10, 2 / 11])


@pytest.mark.parametrize(
    ("how", "expected"),
    [("persist", [0] * 10 + [1] * 15), ("offload", [0] * 10 + [1] * 15), ("recompute", [1] * 25)],
)
def test_an_update_in_the_middle_of_a_prompt(how: str, expected: list[int]) -> None:
    engine = tiny_engine(tiny_model(), enable_chunked_prefill=True, max_tokens=10)
    request_id = engine.add_request(prompt_of(24), params(1, skip_prompt_log_probs=False))
    steps(engine, 1)
    bump(engine, how)
    assert len(engine.get_record(request_id).requests) == 1
    (request,) = steps(engine, 2 if how != "recompute" else 3)
    assert (1 - request.kv_cache_staleness).tolist() == expected
    assert request.context_kv_version_mean == pytest.approx([sum(expected[:24]) / 24])
    assert request.policy_versions.tolist() == [1]
    assert len(request.prompt_log_probs) == 23


def test_provenance_survives_an_eviction() -> None:
    engine = tiny_engine(tiny_model(), num_blocks=6, paused_buffer_size_gb=0.0)
    first, second = (engine.add_request(prompt_of(12, seed=i), params(28)) for i in (0, 1))
    finished = {}
    while not engine.stats().num_evictions:
        engine.step()
    evicted = engine.get_record(second)
    num_before = len(evicted.merge().generated_tokens)
    assert 0 < num_before < 28
    assert len(evicted.requests) == 2
    bump(engine, "in_flight")
    finished = drain(engine)
    request = finished[second]
    num_after = 28 - num_before
    assert request.policy_versions.tolist() == [0] * num_before + [1] * num_after
    assert request.context_kv_version_min == [0] * num_before + [1] * num_after
    assert request.context_kv_version_mean == [0] * num_before + [1] * num_after
    assert request.kv_cache_staleness.tolist() == [0] * 40
    assert finished[first].context_kv_version_min == [0] * 28
    assert finished[first].policy_versions.tolist()[-1] == 1


def test_an_abort_after_an_eviction_keeps_the_version_of_the_last_token() -> None:
    engine = tiny_engine(tiny_model(), num_blocks=6, paused_buffer_size_gb=0.0)
    _, second = (engine.add_request(prompt_of(12, seed=i), params(28)) for i in (0, 1))
    while not engine.stats().num_evictions:
        engine.step()
    bump(engine, "in_flight")
    request = engine.abort_request(second).merge()
    assert request.generated_tokens
    assert request.kv_cache_staleness.tolist() == [0] * (request.num_tokens - 1) + [1]
    untouched = engine.add_request(prompt_of(12), params(28))
    bump(engine, "in_flight")
    assert engine.abort_request(untouched).merge().kv_cache_staleness.tolist() == [0] * 12


@pytest.mark.parametrize("limit", [0, 1])
def test_max_kv_staleness_versions_recomputes_only_older_kv(limit: int) -> None:
    engine = tiny_engine(tiny_model(), max_kv_staleness_versions=limit)
    old = engine.add_request(PROMPT, params(12))
    steps(engine, 2)
    for _ in range(limit):
        bump(engine, "in_flight")
        steps(engine, 2)
    assert len(engine.get_record(old).requests) == 1
    assert engine.stats().num_recomputed_requests == 0
    young = engine.add_request(PROMPT, params(12))
    if limit:
        steps(engine, 1)
    bump(engine, "in_flight")
    assert len(engine.get_record(old).requests) == 2
    assert engine.stats().num_recomputed_requests == 1
    assert len(engine.get_record(young).requests) == 1
    num_before = 2 + 3 * limit
    version = limit + 1
    finished = drain(engine)
    assert finished[old].context_kv_version_min == [0] * num_before + [version] * (12 - num_before)
    assert finished[young].context_kv_version_min == ([limit] * 12 if limit else [version] * 12)
    assert len(finished[old].generated_tokens) == 12


def test_max_kv_staleness_versions_recomputes_offloaded_kv() -> None:
    engine = tiny_engine(
        tiny_model(), max_kv_staleness_versions=0, kv_cache_management_mode="offload"
    )
    engine.add_request(PROMPT, params())
    steps(engine, 3)
    bump(engine, "offload")
    assert engine.stats().num_recomputed_requests == 1
    (request,) = steps(engine, 5)
    assert request.kv_cache_staleness.tolist() == [0] * 16


# ---- the version itself


def test_set_generation_epoch_needs_a_paused_engine_and_a_higher_version() -> None:
    engine = tiny_engine(tiny_model(), weights_version=3)
    request_id = engine.add_request(PROMPT, params())
    steps(engine, 2)
    before = engine.get_record(request_id).merge()
    with pytest.raises(EngineStateError, match="RUNNING"):
        engine.set_generation_epoch(4)
    engine.pause()
    for version in (3, 2, -1):
        with pytest.raises(WeightUpdateError, match=rf"version={version} .*3"):
            engine.set_generation_epoch(version)
    engine.set_generation_epoch(9)
    engine.suspend()
    engine.set_generation_epoch(10)
    assert engine.weights_version == 10
    after = engine.get_record(request_id).merge()
    assert after.generated_tokens == before.generated_tokens
    assert [e.type for e in after.events] == [e.type for e in before.events]
    assert after.status is before.status
    assert after.policy_staleness.tolist() == [7] * 10
    engine.shutdown()
    with pytest.raises(EngineStateError, match="STOPPED"):
        engine.set_generation_epoch(11)


@pytest.mark.parametrize("version", [1.5, "3", True, 2**31, 2**40])
def test_a_version_that_is_not_a_32_bit_integer_is_refused(version: Any) -> None:
    engine = tiny_engine(tiny_model())
    engine.pause()
    with pytest.raises(WeightUpdateError, match=f"version={version!r}"):
        engine.set_generation_epoch(version)
    with pytest.raises(WeightUpdateError, match=f"version={version!r}"):
        engine.update_weights(dict(tiny_model().named_parameters()), version)
    assert engine.weights_version == 0


def test_update_weights_sets_the_given_version_or_the_next_one() -> None:
    engine = tiny_engine(tiny_model(), weights_version=7)
    tensors = dict(tiny_model(seed=1).named_parameters())
    with pytest.raises(EngineStateError, match="RUNNING"):
        engine.update_weights(tensors)
    assert engine.update_weights(tensors, in_flight=True).version == 8
    assert engine.update_weights(tensors, version=20, in_flight=True).version == 20
    with pytest.raises(WeightUpdateError, match="version=20"):
        engine.update_weights(tensors, version=20, in_flight=True)
    engine.pause()
    assert engine.update_weights(tensors).version == engine.weights_version == 21
    engine.suspend()
    assert engine.update_weights(tensors).version == 22
    assert engine.state is EngineState.SUSPENDED
