"""Adapters over vLLM: merged into their base, exactly as in a full update, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout import LoraAdapter, WeightUpdateError
from rollout.engine.engine import Engine
from tests.contracts.vllm_engines import HAS_VLLM, vllm_adapter, vllm_engine, vllm_weights
from tests.lora_adapters import merged

pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An engine without enable_lora."""
    engine = vllm_engine()
    yield engine
    engine.shutdown()


def of_module(module: str, num_inputs: int = 64, num_outputs: int = 64) -> LoraAdapter:
    tensors = {
        f"{module}.lora_A.weight": torch.ones(2, num_inputs),
        f"{module}.lora_B.weight": torch.ones(num_outputs, 2),
    }
    return LoraAdapter(tensors=tensors, rank=2, alpha=1.0)


@pytest.mark.timeout(600)
def test_lora_adapter_over_vllm_is_the_merged_update_and_a_full_update_drops_it(
    engine: Engine,
) -> None:
    first = engine.update_weights(vllm_adapter(1), in_flight=True)
    second = engine.update_weights(vllm_adapter(2), in_flight=True)
    assert first.checksum != second.checksum == engine.weights_checksum()
    assert engine.stats().lora_base_bytes == 0, "the base is the checkpoint"
    staged = engine.stage_weights(vllm_adapter(1))
    expected = merged(vllm_weights(0), vllm_adapter(2))
    assert engine.update_weights(expected, in_flight=True).checksum == second.checksum
    with pytest.raises(WeightUpdateError, match="committed after this adapter was staged"):
        engine.commit_weights(staged, in_flight=True)
    with pytest.raises(WeightUpdateError, match=r"last full update, was not kept.*enable_lora"):
        engine.update_weights(vllm_adapter(1), in_flight=True)
    own = replace(vllm_adapter(1), base=vllm_weights(0))
    assert engine.update_weights(own, in_flight=True).checksum == first.checksum
    num_bytes = sum(tensor.nbytes for tensor in vllm_weights(0).values())
    assert engine.stats().lora_base_bytes == engine.memory_status().lora_base_bytes == num_bytes
    assert engine.update_weights(vllm_adapter(2), in_flight=True).checksum == second.checksum


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (of_module("model.layers.7.self_attn.q_proj"), "is no linear layer of this model"),
        (of_module("model.norm"), "is no linear layer of this model"),
        (of_module(Q, num_inputs=63), "has 63 in features, but the model's layer has 64"),
        (of_module(Q, num_outputs=65), "has 65 out features, but the model's layer has 64"),
    ],
)
def test_lora_adapter_that_does_not_fit_is_refused_over_vllm(
    engine: Engine, adapter: LoraAdapter, reason: str
) -> None:
    before = engine.weights_checksum(), engine.weights_version
    with pytest.raises(WeightUpdateError, match=reason):
        engine.update_weights(adapter, in_flight=True)
    assert (engine.weights_checksum(), engine.weights_version) == before
