"""Tensor parallelism over vLLM's worker processes: a dead worker, and the end of the engine."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from rollout import SamplingParams
from rollout.errors import ConfigError, EngineStateError, LockstepError
from tests.contracts.vllm_engines import HAS_VLLM, vllm_engine, vllm_weights

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")
PARAMS = SamplingParams(num_tokens_to_generate=60, termination_id=-1)


def files_of_updates() -> set[Path]:
    """The files of updates on this machine, which other engines may have, too."""
    return {*Path("/dev/shm").glob("rollout-vllm-*")}


@pytest.mark.timeout(900)
def test_dead_worker_of_tensor_parallel_vllm_ends_the_engine_and_leaves_nothing() -> None:
    files, before = files_of_updates(), {*multiprocessing.active_children()}
    engine = vllm_engine(tensor_parallel_size=2)
    workers = [worker.proc for worker in engine._executor._core.model_executor.workers]
    try:
        engine.add_request([3, 1, 4], PARAMS)
        engine.step()
        engine.update_weights(vllm_weights(1), in_flight=True)
        engine.step()
        engine.check_ranks()
        workers[1].kill()
        workers[1].join()
        with pytest.raises(LockstepError, match=r"worker process.* of vLLM has died"):
            engine.check_ranks()
        with pytest.raises(LockstepError, match=r"worker process.* of vLLM has died"):
            engine.step()
        with pytest.raises(EngineStateError, match="create a new engine"):
            engine.update_weights(vllm_weights(2), in_flight=True)
    finally:
        engine.shutdown()
    assert {*multiprocessing.active_children()} == before
    assert files_of_updates() == files


@pytest.mark.timeout(600)
def test_pipeline_parallel_size_of_vllm_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size'\]=2.*tensor_parallel_size"):
        vllm_engine(engine_options={"pipeline_parallel_size": 2})
