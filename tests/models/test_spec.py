"""ModelSpec from and to Hugging Face configs, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.errors import ModelError
from rollout.layers.rope import RopeSpec
from rollout.models import ModelSpec
from tests.models.hf_models import CONFIG_CLASSES, LLAMA3_ROPE, YARN_ROPE, hf_config

# Written as transformers v4 wrote it.
QWEN2_V4 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "eos_token_id": [151645, 151643],
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_v4_config_gives_every_field() -> None:
    assert ModelSpec.from_hf_config(QWEN2_V4) == ModelSpec(
        family="qwen2",
        vocab_size=151936,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=4864,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=1_000_000.0),
        tie_word_embeddings=True,
        attention_bias=True,
        eos_token_ids=(151645, 151643),
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("family", CONFIG_CLASSES)
@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, YARN_ROPE, {"type": "linear", "factor": 2}])
def test_v4_and_v5_notation_of_rope_mean_the_same(
    family: str, scaling: dict[str, Any] | None
) -> None:
    v5 = hf_config(family, rope_theta=5e5, rope_scaling=scaling).to_dict()
    v4 = {key: value for key, value in v5.items() if key != "rope_parameters"}
    v4 |= {"rope_theta": 5e5, "rope_scaling": scaling}
    spec = ModelSpec.from_hf_config(v5)
    assert spec == ModelSpec.from_hf_config(v4)
    assert spec.rope.theta == 5e5
    assert spec.rope.kind == (scaling or {}).get("rope_type", "linear" if scaling else "default")


@pytest.mark.parametrize("family", CONFIG_CLASSES)
@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, YARN_ROPE])
def test_written_configs_read_back_the_same_through_transformers(
    family: str, scaling: dict[str, Any] | None
) -> None:
    config = hf_config(family, rope_scaling=scaling, tie_word_embeddings=True, dtype="bfloat16")
    spec = ModelSpec.from_hf_config(config.to_dict())
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec
    through_transformers = CONFIG_CLASSES[family](**spec.to_hf_config()).to_dict()
    assert ModelSpec.from_hf_config(through_transformers) == spec


def test_yarn_attention_factor_follows_the_paper_unless_given() -> None:
    implied = ModelSpec.from_hf_config(hf_config("qwen3", rope_scaling=YARN_ROPE).to_dict())
    assert implied.rope.attention_factor == pytest.approx(1.1386294)
    given = YARN_ROPE | {"attention_factor": 1.5}
    explicit = ModelSpec.from_hf_config(hf_config("qwen3", rope_scaling=given).to_dict())
    assert explicit.rope.attention_factor == 1.5


def test_a_window_that_no_layer_uses_is_no_obstacle() -> None:
    config = QWEN2_V4 | {"use_sliding_window": True, "max_window_layers": 24}
    assert ModelSpec.from_hf_config(config) == ModelSpec.from_hf_config(QWEN2_V4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba'.*llama, qwen2, qwen3"),
        ({"model_type": None}, "None is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*llama3"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 63}, "head_dim=63"),
        ({"torch_dtype": "int8"}, "'int8'.*bfloat16"),
    ],
)
def test_configs_that_would_run_wrongly_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf_config(QWEN2_V4 | change)


def test_a_spec_its_family_cannot_express_is_not_written() -> None:
    spec = replace(ModelSpec.from_hf_config(QWEN2_V4), attention_bias=False)
    with pytest.raises(ModelError, match="attention_bias"):
        spec.to_hf_config()
