"""Aborts in every state, checks of updates, and partial resumes."""

from __future__ import annotations

from functools import cache
from itertools import chain, repeat
from typing import Any

import pytest

from rollout import (
    ConfigError,
    DynamicInferenceEngine,
    EngineState,
    EngineStateError,
    RequestAbortedError,
    SamplingParams,
    Status,
    WeightUpdateError,
)
from rollout.telemetry import RANK_FIELDS
from tests.engine.faulty_backend import failing_steps
from tests.tiny_models import drain, generate_all, prompt_of, tiny_engine, tiny_model

# What an engine has from its start.
SIZES = ("block_size_tokens", "max_sequence_length", "num_blocks_total", "num_blocks_free")
PARAMS = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True)
S = EngineState
PATHS = {
    S.RUNNING: (),
    S.PAUSED: ("pause",),
    S.SUSPENDED: ("pause", "suspend"),
    S.STOPPED: ("shutdown",),
}


@cache
def model() -> Any:
    return tiny_model()


def engine_in(state: EngineState, **config: Any) -> DynamicInferenceEngine:
    """Return an engine in `state` with request 0 in generation."""
    engine = tiny_engine(model(), **config)
    engine.add_request(prompt_of(9), PARAMS)
    for _ in range(3):
        engine.step()
    for command in PATHS[state]:
        getattr(engine, command)()
    assert engine.state is state
    return engine


def test_suspend_refuses_an_unknown_mode_and_the_engine_stays_paused() -> None:
    engine = engine_in(S.PAUSED)
    with pytest.raises(ConfigError, match=r"mode='keep' must be one of \['persist', 'offload'"):
        engine.suspend("keep")
    assert engine.state is S.PAUSED
    engine.unpause()
    assert len(drain(engine)[0].generated_tokens) == 10


def test_abort_request_returns_records_after_shutdown() -> None:
    engine = engine_in(S.SUSPENDED, kv_cache_management_mode="offload")
    engine.shutdown()
    engine.shutdown()
    request = engine.abort_request(0).merge()
    assert len(request.generated_tokens) == 3
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineStateError, match="must be RUNNING or PAUSED or SUSPENDED;"):
        engine.add_request(prompt_of(9), PARAMS)


def test_shutdown_stops_the_engine_also_if_the_step_in_flight_fails() -> None:
    # A failed step, a prefill, and a decode step that is in flight when the device breaks for good.
    faults = chain(("fetch", "fetch", None, "fetch"), repeat("launch"))
    engine = tiny_engine(model(), change_backend=failing_steps(lambda: next(faults), overlaps=True))
    engine.add_request(prompt_of(9), PARAMS)
    for _ in range(2):
        engine.step()
    assert engine.num_steps_in_flight == 1
    engine.shutdown()
    assert engine.state is S.STOPPED
    assert engine.num_steps_in_flight == 0
    assert not engine.kv_data_ptrs()
    assert engine.abort_request(0).merge().finish_reason == "abort"


# ---- abort


def aborted(engine: DynamicInferenceEngine, request_id: int, num_tokens: int) -> None:
    """Abort a request and check its record, which only the abort returns."""
    expected = generate_all(tiny_engine(model()), [(prompt_of(9), PARAMS)])[0]
    request = engine.abort_request(request_id).merge()
    assert (request.status, request.finish_reason) == (Status.FAILED, "abort")
    assert request.generated_tokens == expected.generated_tokens[:num_tokens]
    assert len(request.generated_log_probs) == num_tokens
    assert len(request.policy_staleness) == len(request.kv_cache_staleness) == 9 + num_tokens
    error, failed = request.events[-2:]
    assert isinstance(error.payload, RequestAbortedError)
    assert failed.type.name == "FAIL"
    with pytest.raises(EngineStateError, match=f"request {request_id} "):
        engine.abort_request(request_id)
    assert engine.stats().num_failed == 1


def test_abort_of_a_queued_request() -> None:
    engine = tiny_engine(model(), max_requests=1)
    for _ in range(2):
        engine.add_request(prompt_of(9), PARAMS)
    aborted(engine, 1, 0)
    engine.step()
    assert list(drain(engine)) == [0]


def test_abort_of_a_running_request_frees_its_blocks() -> None:
    engine = engine_in(S.RUNNING)
    aborted(engine, 0, 3)
    assert engine.stats().num_blocks_used == 0
    assert engine.step() == []


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("state", [S.PAUSED, S.SUSPENDED], ids=lambda state: state.name)
def test_abort_while_paused_or_suspended_frees_one_of_two_requests(
    state: EngineState, mode: str
) -> None:
    engine = tiny_engine(model(), kv_cache_management_mode=mode)
    for _ in range(2):
        engine.add_request(prompt_of(9), PARAMS)
    for _ in range(3):
        engine.step()
    engine.pause()
    report = engine.suspend() if state is S.SUSPENDED else None
    aborted(engine, 0, 3)
    assert engine.state is state
    if report is not None:
        restored = engine.resume().bytes_restored
        if mode == "offload":
            assert restored == report.bytes_on_host // 2 > 0
    engine.unpause()
    (expected,) = generate_all(tiny_engine(model()), [(prompt_of(9), PARAMS)])
    assert drain(engine)[1].generated_tokens == expected.generated_tokens
    assert engine.stats().num_blocks_used == 0


def test_abort_of_a_paused_request() -> None:
    engine = tiny_engine(model(), num_blocks=7, paused_buffer_size_gb=1.0)
    for _ in range(3):
        engine.add_request(prompt_of(9), PARAMS)
    for _ in range(9):  # all three fill their second block together, and one block is left
        engine.step()
    assert engine.get_record(1).current.status is Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
    aborted(engine, 1, 8)
    assert len(drain(engine)) == 2


def test_abort_in_the_middle_of_a_prompt() -> None:
    engine = tiny_engine(model(), enable_chunked_prefill=True, max_tokens=4)
    engine.add_request(prompt_of(9), PARAMS)
    engine.step()
    aborted(engine, 0, 0)
    assert engine.stats().num_blocks_used == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_abort_of_a_group_member_leaves_the_shared_blocks_to_the_others(victim: int) -> None:
    engine = tiny_engine(model(), kv_cache_management_mode="offload")
    engine.add_group(prompt_of(9), [PARAMS] * 3)
    engine.step()
    engine.pause()
    engine.suspend()
    aborted(engine, victim, 1)
    engine.resume()
    engine.unpause()
    (expected,) = generate_all(tiny_engine(model()), [(prompt_of(9), PARAMS)])
    finished = drain(engine)
    assert len(finished) == 2
    for request in finished.values():
        assert request.generated_tokens == expected.generated_tokens
    assert engine.stats().num_blocks_used == 0


def test_stats_of_a_new_engine_are_zero_and_an_update_counts_once() -> None:
    engine = tiny_engine(model())
    stats = engine.stats()
    passed_over = (*SIZES, *RANK_FIELDS)
    counts = {n: value for n, value in stats.as_metrics("").items() if n not in passed_over}
    assert set(counts.values()) == {0}
    engine.pause()
    engine.update_weights(dict(model().named_parameters()))
    stats = engine.stats()
    assert (stats.num_weight_updates, stats.weights_version) == (1, 1)
    assert stats.update_seconds > 0


def test_check_update_raises_what_a_commit_would_raise() -> None:
    engine = tiny_engine(model(), weights_version=3)
    with pytest.raises(EngineStateError, match="update weights"):
        engine.check_update()
    engine.check_update(in_flight=True)
    engine.pause()
    for version in (None, 4, 9):
        engine.check_update(version)
    for version in (3, 2**31):
        with pytest.raises(WeightUpdateError, match=f"version={version}"):
            engine.check_update(version)


def test_a_first_version_beyond_int32_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights_version=2147483648"):
        tiny_engine(model(), weights_version=2**31)


@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_resume_only_returns_to_paused_once_both_resources_are_restored(first: str) -> None:
    engine = engine_in(S.PAUSED)
    engine.suspend("offload", ("kv_cache", "weights"))
    with pytest.raises(ConfigError, match="only='hair'"):
        engine.resume(only="hair")
    engine.resume(only=first)
    assert engine.state is S.SUSPENDED
    engine.resume(only={"weights": "kv_cache", "kv_cache": "weights"}[first])
    assert engine.state is S.PAUSED
    engine.unpause()
    assert len(drain(engine)[0].generated_tokens) == 10
