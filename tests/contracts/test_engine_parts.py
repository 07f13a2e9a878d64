"""Contract of the Protocols of rollout.engine.protocols: scheduler, pipeline, executor, suspension.

It runs over this project's parts and over the parts of tests/contracts/listed_engine.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout import EngineState, SamplingParams
from rollout.engine.engine import Engine
from rollout.errors import ConfigError, EngineStateError, WeightUpdateError
from rollout.models.plain_tensors import named_weights
from tests.contracts.listed_engine import listed_engine, table_of
from tests.contracts.vllm_engines import HAS_VLLM, vllm_engine, vllm_weights
from tests.inspected_engine import running_ahead
from tests.tiny_models import drain, tiny_engine, tiny_model

Weights = dict[str, Tensor]
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6], [5, 3])
PARAMS = SamplingParams(num_tokens_to_generate=8, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """How to make an engine that serves weights of a seed, and those weights by name.

    `modes`: KV modes of `suspend` that it has; it refuses the others. `resources`: those that it
    releases; it refuses the others."""

    make: Callable[..., Engine]
    weights: Callable[[int], Weights]
    modes: frozenset[str]
    resources: frozenset[str] = frozenset({"kv_cache", "weights"})


@cache
def _model(seed: int) -> Any:
    return tiny_model(seed=seed, std=0.4)


def _model_weights(seed: int) -> Weights:
    return {name: tensor.detach() for name, tensor in named_weights(_model(seed)).items()}


def _own(**config: Any) -> Engine:
    return tiny_engine(_model(0), num_blocks=64, **config)


def _running_ahead(**config: Any) -> Engine:
    return tiny_engine(_model(0), num_blocks=64, change_backend=running_ahead, **config)


ALL_MODES = frozenset({"persist", "offload", "recompute"})
IMPLEMENTATIONS = {
    "own": Implementation(make=_own, weights=_model_weights, modes=ALL_MODES),
    "running-ahead": Implementation(make=_running_ahead, weights=_model_weights, modes=ALL_MODES),
    "listed": Implementation(
        make=lambda **config: listed_engine(table_of(0), **config),
        weights=table_of,
        modes=frozenset({"persist", "recompute"}),
    ),
}
if HAS_VLLM:
    IMPLEMENTATIONS["vllm"] = Implementation(
        make=vllm_engine,
        weights=vllm_weights,
        modes=frozenset({"persist", "recompute"}),
        resources=frozenset({"kv_cache"}),
    )


@pytest.fixture(params=IMPLEMENTATIONS)
def parts(request: pytest.FixtureRequest) -> Implementation:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def engine(parts: Implementation) -> Iterator[Engine]:
    """Return an engine of the first weights with three requests that have not run."""
    engine = with_requests(parts)
    yield engine
    engine.shutdown()


def with_requests(parts: Implementation, **config: Any) -> Engine:
    engine = parts.make(**config)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    return engine


def step(engine: Engine, count: int = 1) -> None:
    """Run `count` steps, before any request can end."""
    for _ in range(count):
        assert engine.step() == []
        engine.check_integrity(may_be_in_flight=True)


def expected_tokens(parts: Implementation) -> list[list[int]]:
    engine = with_requests(parts)
    try:
        return tokens_of_all(engine)
    finally:
        engine.shutdown()


def tokens_of_all(engine: Engine) -> list[list[int]]:
    found: Any = drain(engine)  # type: ignore[arg-type]
    return [request.generated_tokens for _, request in sorted(found.items())]


def versions(spans: Any) -> list[int]:
    return [int(version) for version in spans.to_array()]


# ---- SchedulerInterface


def test_scheduler_has_a_request_until_it_ends(engine: Engine) -> None:
    scheduler = engine._scheduler
    first, second, third = engine.request_ids()
    assert {*scheduler.request_ids()} == {first, second, third}
    assert engine.num_waiting == 3
    step(engine, 2)
    assert sorted(scheduler.running_ids()) == [first, second, third]
    counts = scheduler.counts()
    assert (counts.num_waiting, counts.num_running) == (0, 3)
    assert counts.num_blocks_used > 0
    engine.abort_request(second)
    assert {*scheduler.request_ids()} == {first, third}
    engine.check_integrity(may_be_in_flight=True)
    drain(engine)  # type: ignore[arg-type]
    assert not scheduler.request_ids()
    assert scheduler.counts().num_blocks_used == 0
    engine.check_integrity()


def test_finish_request_returns_who_wrote_its_kv(engine: Engine) -> None:
    step(engine, 3)
    engine.pause()
    request_id = engine.request_ids()[0]
    known = versions(engine._scheduler.kv_spans(request_id))
    record = engine.abort_request(request_id)
    num_computed = len(record.current.prompt_tokens) + len(record.current.generated_tokens) - 1
    assert versions(record.current.kv_spans)[:num_computed] == known == [0] * num_computed


def test_requeue_older_than_takes_the_kv_of_those_that_have_old_kv_alone(engine: Engine) -> None:
    step(engine, 2)
    engine.pause()
    scheduler, before = engine._scheduler, engine.request_ids()
    assert list(scheduler.requeue_older_than(0)) == []
    engine.unpause()
    requeued = list(engine._scheduler.requeue_older_than(1))
    engine._outputs.requeue(requeued)
    assert sorted(requeued) == before
    assert engine.num_waiting == 3
    assert all(not len(scheduler.kv_spans(request_id)) for request_id in requeued)
    engine.check_integrity()


def test_max_kv_staleness_versions_bounds_the_age_of_kv(parts: Implementation) -> None:
    engine = with_requests(parts, max_kv_staleness_versions=1)
    step(engine, 2)
    for version in (1, 2):
        engine.update_weights(parts.weights(version), in_flight=True)
        step(engine)
    spans = [engine._scheduler.kv_spans(request_id) for request_id in engine.request_ids()]
    assert all(len(each) and each.min() >= 1 for each in spans)
    assert engine.stats().num_recomputed_requests == 3
    engine.shutdown()


# ---- PipelineInterface


def test_commit_all_leaves_no_step_in_flight(engine: Engine) -> None:
    pipeline = engine._pipeline
    assert pipeline.num_in_flight == 0
    step(engine, 2)
    pipeline.commit_all()
    assert pipeline.num_in_flight == engine.num_steps_in_flight == 0
    engine.check_integrity()
    at = pipeline.last_result_at
    pipeline.commit_all()
    assert pipeline.last_result_at == at > 0


def test_step_does_nothing_when_idle(parts: Implementation) -> None:
    engine = parts.make()
    assert engine.step() == []
    assert engine.stats().num_steps == 0
    engine.check_integrity()
    engine.shutdown()


def test_tokens_and_kv_have_the_version_of_the_step_that_ran(
    parts: Implementation, engine: Engine
) -> None:
    """Also of steps in flight when the weights change: they are committed before."""
    step(engine, 3)
    before = {i: len(engine.get_record(i).current.generated_tokens) for i in engine.request_ids()}
    engine.update_weights(parts.weights(1), version=5, in_flight=True)
    drained = {i: len(engine.get_record(i).current.generated_tokens) for i in engine.request_ids()}
    engine.check_integrity()
    requests: Any = drain(engine)  # type: ignore[arg-type]
    for request_id, request in requests.items():
        num_prompt, num_old = len(request.prompt_tokens), drained[request_id]
        assert before[request_id] <= num_old < 8
        policy, kv = versions(request.policy_spans), versions(request.kv_spans)
        assert policy[num_prompt:] == [0] * num_old + [5] * (8 - num_old)
        # The last old token's KV is written by the first step under the new weights.
        num_old_kv = num_prompt + num_old - 1
        assert kv[: num_old_kv + 1] == [0] * num_old_kv + [5]
        assert set(kv[num_old_kv:]) == {5}


# ---- Executor


def test_stage_weights_changes_nothing_and_commit_weights_everything(
    parts: Implementation, engine: Engine
) -> None:
    step(engine)
    before = engine.weights_checksum()
    staged = engine.stage_weights(parts.weights(1))
    assert (engine.weights_version, engine.weights_checksum()) == (0, before)
    report = engine.commit_weights(staged, version=3, in_flight=True)
    assert engine.weights_version == report.version == 3
    assert engine.weights_checksum() == staged.checksum == report.checksum != before
    engine.update_weights(parts.weights(0), in_flight=True)
    assert (engine.weights_version, engine.weights_checksum()) == (4, before)
    sums = engine.weight_checksums()
    assert sorted(sums.checksums) == sorted(parts.weights(0))
    drain(engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "nan", "checksum"])
def test_stage_weights_refuses_a_wrong_update_by_name(
    parts: Implementation, engine: Engine, fault: str
) -> None:
    weights, announced = parts.weights(1), ""
    name = sorted(weights)[0]
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        name, weights = "no.such.weight", {**weights, "no.such.weight": torch.ones(2)}
    elif fault == "shape":
        weights[name] = torch.cat([weights[name], weights[name]])
    elif fault == "nan":
        weights[name] = torch.full_like(weights[name], torch.nan)
    else:
        name = announced = "0123456789abcdef"
    before = engine.weights_checksum()
    with pytest.raises(WeightUpdateError, match=name if fault != "checksum" else "announced"):
        engine.stage_weights(weights, source_checksum=announced)
    assert (engine.weights_version, engine.weights_checksum()) == (0, before)
    drain(engine)  # type: ignore[arg-type]


def test_stage_weights_is_cancelled_by_its_check(parts: Implementation, engine: Engine) -> None:
    def cancel() -> None:
        raise WeightUpdateError("cancelled")

    before = engine.weights_checksum()
    with pytest.raises(WeightUpdateError, match="cancelled"):
        engine.stage_weights(parts.weights(1), cancel)
    assert engine.weights_checksum() == before


def test_commit_weights_takes_versions_above_the_current_one(
    parts: Implementation, engine: Engine
) -> None:
    engine.pause()
    engine.update_weights(parts.weights(1), version=3)
    checksum = engine.weights_checksum()
    for refused in (
        lambda: engine.update_weights(parts.weights(0), version=3),
        lambda: engine.set_generation_epoch(2),
    ):
        with pytest.raises(WeightUpdateError):
            refused()
        assert (engine.weights_version, engine.weights_checksum()) == (3, checksum)
    engine.set_generation_epoch(7)
    assert (engine.weights_version, engine.weights_checksum()) == (7, checksum)


def test_staged_updates_that_are_never_committed_are_dropped(
    parts: Implementation, engine: Engine
) -> None:
    first, second = (engine.stage_weights(parts.weights(seed)) for seed in (1, 2))
    del first
    gc.collect()
    engine.commit_weights(second, in_flight=True)
    assert engine.weights_checksum() == second.checksum


def test_close_ends_an_executor_and_may_come_twice(parts: Implementation) -> None:
    engine = parts.make()
    engine.check_ranks()
    assert [use.rank for use in engine.stats().ranks] == [0]
    engine.shutdown()
    engine.shutdown()
    assert engine.state is EngineState.STOPPED


# ---- SuspensionInterface


@pytest.mark.parametrize("release", [("kv_cache",), ("weights",), ("kv_cache", "weights")])
@pytest.mark.parametrize("mode", sorted(ALL_MODES))
def test_requests_go_on_after_suspend_and_resume_or_the_mode_is_refused_by_name(
    parts: Implementation, engine: Engine, mode: str, release: tuple[str, ...]
) -> None:
    step(engine, 3)
    engine.pause()
    refused = mode if mode not in parts.modes else min({*release} - parts.resources, default="")
    if refused:
        with pytest.raises(ConfigError, match=refused):
            engine.suspend(mode, release)
        assert engine.state is EngineState.PAUSED
    else:
        engine.suspend(mode, release)
        assert set(engine.memory_status().released) == set(release)
        engine.check_integrity()
        engine.resume()
    assert engine.memory_status().to_restore == ()
    engine.check_integrity()
    engine.unpause()
    assert tokens_of_all(engine) == expected_tokens(parts)


def test_resume_of_one_resource_leaves_the_engine_suspended(
    parts: Implementation, engine: Engine
) -> None:
    if "weights" not in parts.resources:
        pytest.skip("it has one resource")
    step(engine, 2)
    engine.pause()
    engine.suspend("recompute", ("kv_cache", "weights"))
    engine.resume("weights")
    assert engine.state is EngineState.SUSPENDED
    assert engine.memory_status().to_restore == ("kv_cache",)
    engine.resume("kv_cache")
    assert engine.state is EngineState.PAUSED
    engine.check_integrity()


def test_suspend_and_resume_refuse_an_unknown_resource(engine: Engine) -> None:
    engine.pause()
    with pytest.raises(ConfigError, match="'logits'"):
        engine.suspend("persist", ("logits",))
    engine.suspend("persist", ("kv_cache",))
    with pytest.raises(ConfigError, match="'logits'"):
        engine.resume("logits")
    engine.resume()


def test_discarded_weights_come_back_with_an_update(parts: Implementation, engine: Engine) -> None:
    if "weights" not in parts.resources:
        pytest.skip("it keeps its weights")
    engine.pause()
    engine.suspend("recompute", ("weights",), discard_weights=True)
    engine.resume()
    with pytest.raises(EngineStateError, match="cannot unpause"):
        engine.unpause()
    engine.update_weights(parts.weights(0))
    engine.unpause()
    assert tokens_of_all(engine) == expected_tokens(parts)
