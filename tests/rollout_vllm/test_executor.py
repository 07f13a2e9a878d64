"""VllmExecutor keeps the promises of Executor that no engine on a CPU can show."""

from __future__ import annotations

import pytest

from rollout import EngineStateError, WeightUpdateError
from tests.contracts.vllm_engines import HAS_VLLM, vllm_engine, vllm_weights

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
def test_stage_weights_refuses_an_update_of_a_mixture_of_experts() -> None:
    """A reload of vLLM 0.32 leaves a mixture on a CPU with wrong experts."""
    engine = vllm_engine("qwen3_moe")
    try:
        with pytest.raises(WeightUpdateError, match="does not update mixtures of experts"):
            engine.update_weights(vllm_weights(1, "qwen3_moe"), in_flight=True)
        assert engine.weights_version == 0
    finally:
        engine.shutdown()
