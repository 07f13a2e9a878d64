"""Parts of an engine over vLLM that the contract suite and the random schedules leave out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout import EngineStateError, SamplingParams, WeightUpdateError
from tests.contracts.vllm_engines import BLOCK_SIZE, HAS_VLLM, vllm_engine, vllm_weights

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")


@pytest.mark.timeout(600)
def test_weights_checksum_is_refused_while_the_weights_are_released() -> None:
    engine = vllm_engine()
    try:
        engine._executor.is_resident = False  # as vLLM's sleep does on CUDA
        for compute in (engine.weights_checksum, engine.weight_checksums):
            with pytest.raises(EngineStateError, match="the weights are released; resume first"):
                compute()
    finally:
        engine.shutdown()


@pytest.mark.timeout(600)
def test_logging_step_interval_writes_every_such_step_of_vllm() -> None:
    written: list[dict[str, float]] = []
    writer = SimpleNamespace(log=lambda metrics: written.append(dict(metrics)))
    engine = vllm_engine(metrics_writer=writer, logging_step_interval=2)
    try:
        engine.add_request([3, 1, 4], SamplingParams(num_tokens_to_generate=6, termination_id=-1))
        while engine.has_unfinished_requests():
            engine.step()
        rows = [row for row in written if "engine/last_step/step" in row]
        assert [row["engine/last_step/step"] for row in rows] == [2, 4, 6]
        assert all(row["engine/last_step/num_decode_tokens"] == 1 for row in rows)
        assert engine.stats().num_steps == 6
    finally:
        engine.shutdown()


@pytest.mark.timeout(600)
def test_prefix_of_mixed_versions_is_not_found_by_a_request_of_the_same_step() -> None:
    """vLLM indexes a block when it schedules its last token, before the requests that wait."""
    engine = vllm_engine(enable_prefix_caching=True)
    try:
        params = SamplingParams(num_tokens_to_generate=40, temperature=0.0, termination_id=-1)
        first = engine.add_request([3] * (BLOCK_SIZE - 4), params)
        engine.step()
        engine.update_weights(vllm_weights(1), in_flight=True)
        while (request := engine.get_record(first).current).num_tokens < BLOCK_SIZE:
            engine.step()
        prompt = [*map(int, request.prompt_tokens), *request.generated_tokens, 5]
        second = engine.add_request(prompt, params)
        engine.step()
        assert {version for *_, version in engine.get_record(second).current.kv_spans} == {1}
    finally:
        engine.shutdown()


@pytest.mark.timeout(600)
def test_update_that_shared_memory_cannot_hold_leaves_vllm_untouched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Worker processes read an update from a file; here the worker in this process does so."""
    from rollout_vllm import executor

    engine = vllm_engine()
    try:
        monkeypatch.setattr(executor, "UniProcExecutor", ())
        monkeypatch.setattr(executor, "_SHARED_MEMORY", tmp_path / "absent")
        before = engine.weights_checksum()
        with pytest.raises(WeightUpdateError, match=r"absent.*the serving weights are kept.*shm"):
            engine.update_weights(vllm_weights(1), in_flight=True)
        assert (engine.weights_checksum(), engine.weights_version) == (before, 0)
        monkeypatch.setattr(executor, "_SHARED_MEMORY", tmp_path)
        engine.update_weights(vllm_weights(1), in_flight=True)
        assert not [*tmp_path.iterdir()]
    finally:
        engine.shutdown()
