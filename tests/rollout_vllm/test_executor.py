"""VllmExecutor keeps the promises of Executor that no engine on a CPU can show."""

from __future__ import annotations

import pytest

from rollout import EngineStateError
from tests.contracts.vllm_engines import HAS_VLLM, vllm_engine

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
