"""Configs with wrong, absent or new keys are refused, or give the logits of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from random import Random
from typing import Any

import pytest
import transformers
from transformers import AutoConfig

from rollout.errors import ModelError
from rollout.models import ModelSpec
from rollout.models.config_keys import HARMLESS, KINDS, READ, WITHOUT_EFFECT
from rollout.models.families.registry import FAMILIES
from rollout.models.rope_config import DEFAULT_THETA, FULL, SLIDING
from tests.models.config_fuzz import (
    ABSENT,
    ACCEPTED,
    HEAD,
    PUBLISHED,
    REFUSED,
    count_outcomes,
    outcome_of,
    row_of,
    variants_of,
)
from tests.run_seed import run_seed

# Transformers 5.17 reads fewer keys (swiglu_limit, rotary_dim) and has another gelu in Gemma.
oracle = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 18),
    reason="this transformers makes other models of some configs",
)
SAMPLE = 60  # variants of each family; about one in eight is accepted, and compared


@pytest.mark.drawn(20)
@oracle
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_logits_of_transformers(name: str) -> None:
    assert outcome_of(PUBLISHED[name], run_seed()) == (ACCEPTED, "")


@pytest.mark.drawn(8)
@oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_variants_of_configs_are_refused_or_give_the_logits_of_transformers(
    family: str,
) -> None:
    variants = Random(run_seed()).sample(variants_of(family), SAMPLE)
    _, faults = count_outcomes(variants, run_seed())
    assert not faults, "\n".join(faults)


@oracle
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_variants_of_configs_are_refused_or_give_the_logits_of_transformers(
    family: str, record_property: Callable[[str, object], None]
) -> None:
    counts, faults = count_outcomes(variants_of(family), run_seed())
    record_property("table", (HEAD, row_of(family, counts)))
    assert not faults, "\n".join(faults)


NO_ANGLES = {"type": "longrope", "short_factor": [0.0] * 8, "long_factor": [1.0] * 8}
NO_RAMP = {"type": "yarn", "factor": 2.0, "beta_fast": -1}


def changed(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A published config without the keys whose change is ABSENT."""
    config = PUBLISHED[name] | changes
    return {key: value for key, value in config.items() if value is not ABSENT}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *((name, {"is_causal": False}, "is_causal=False.*True") for name in PUBLISHED),
        ("Llama-3-8B", {"is_causal": 0}, "is_causal=0"),
        ("Llama-3-8B", {"is_causal": None}, "is_causal=None"),
        ("Llama-3-8B", {"no_such_key": False}, "no_such_key=False.*remove it"),
        ("Llama-3-8B", {"no_such_key": None}, "no_such_key=None.*remove it"),
        ("Llama-3-8B", {"sliding_window": 11}, "sliding_window=11"),
        ("OLMoE-1B-7B-0924", {"sliding_window": 0}, "sliding_window=0"),
        ("OLMoE-1B-7B-0924", {"clip_qkv": 0}, "clip_qkv=0"),
        ("gemma-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("GLM-4-9B-0414", {"rope_interleave": False}, "rope_interleave=False"),
        ("command-r7b-12-2024", {"rope_interleave": False}, "rope_interleave=False"),
        ("Phi-3-mini-4k", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'.*phi3"),
        ("MiniMax-M2", {"rotary_dim": 0}, "rotary_dim=0"),
        ("MiniMax-M2", {"partial_rotary_factor": None}, "partial_rotary_factor=None"),
        ("GLM-4-9B-0414", {"partial_rotary_factor": 0}, "partial_rotary_factor=0"),
        ("MiniMax-M2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        *(
            (name, {"sliding_window": 0}, "sliding_window=0")
            for name in ("Mistral-7B-v0.1", "Phi-3-mini-4k", "gpt-oss-20b", "gemma-2-2b")
        ),
        *(
            (name, {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1}, "=0")
            for name in ("Qwen2-7B", "Qwen1.5-MoE-A2.7B")
        ),
        ("Qwen1.5-MoE-A2.7B", {"layer_types": [SLIDING] * 4}, "use_sliding_window=False"),
        ("Qwen1.5-MoE-A2.7B", {"num_local_experts": 8}, "num_local_experts=8"),
        ("Mixtral-8x7B", {"num_experts": 4}, "num_experts=4 and num_local_experts=8"),
        *(
            (name, {"hidden_activation": "gelu"}, "hidden_activation='gelu'")
            for name in ("gemma-2-2b", "gemma-3-1b-it")
        ),
        *(
            (name, {"rope_scaling": {"type": "linear", "factor": 8.0}}, "type='linear'.*rope_type")
            for name in ("Olmo-3-7B", "gemma-3-4b (text)")
        ),
        ("Olmo-3-7B", {"rope_theta": 10_000.0}, "rope_theta=10000.0.*500000.0"),
        ("Olmo-3-7B", {"original_max_position_embeddings": 16}, "max_position_embeddings=16"),
        (
            "Olmo-3-7B saved by transformers 5",
            {"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5",
        ),
        (
            "Olmo-3-7B saved by transformers 5",
            {"rope_parameters": {"chunked_attention": {"rope_theta": 1e4}}},
            "chunked_attention.*per layer type",
        ),
        ("DeepSeek-V3", {"head_dim": 16}, "head_dim=16.*qk_rope_head_dim=8"),
        ("DeepSeek-V3", {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("DeepSeek-V3", {"head_dim": None}, "head_dim=None"),
        ("Qwen3-0.6B", {"dtype": 0}, "dtype 0"),
        ("Qwen3-0.6B", {"quantization_config": {}}, "quant_method='None'"),
        ("granite-3.1-2b", {"logits_scaling": 0}, "logits_scaling=0"),
        ("Llama-3-8B", {"rope_theta": 10**400}, "rope_theta=1000"),
        ("Llama-3-8B", {"hidden_size": 2**40}, "hidden_size=1099511627776"),
        ("Llama-3-8B", {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\].*string"),
        ("Llama-3-8B", {"vocab_size": ABSENT}, "vocab_size is missing"),
        ("Llama-3-8B", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
        ("Phi-3-mini-128k", {"rope_scaling": NO_ANGLES}, "short_factor.*must be positive"),
        ("Qwen2.5-7B-Instruct with YaRN", {"rope_scaling": NO_RAMP}, "beta_fast=-1"),
    ],
)
def test_config_with_other_logits_than_transformers_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf_config(changed(name, changes))


WINDOW_ON_LATE_LAYERS = {"use_sliding_window": True, "sliding_window": 11}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(
            (name, WINDOW_ON_LATE_LAYERS | {"max_window_layers": ABSENT})
            for name in ("Qwen2-7B", "Qwen3-0.6B", "Qwen1.5-MoE-A2.7B")
        ),
        *(
            (name, WINDOW_ON_LATE_LAYERS | {"max_window_layers": 2, "layer_types": None})
            for name in ("Qwen2-7B", "Qwen3-0.6B", "Qwen1.5-MoE-A2.7B")
        ),
        ("Qwen1.5-MoE-A2.7B", {"sliding_window": 0, "layer_types": None}),
        ("Ministral-8B-2410", {"layer_types": None}),
        ("Ministral-8B-2410", {"layer_types": [FULL] * 4, "sliding_window": 0}),
        ("SmolLM3-3B", {"layer_types": None, "no_rope_layers": None}),
        ("gemma-3-270m", {"layer_types": None, "sliding_window_pattern": 2}),
        ("GLM-4.7-Flash", {"mlp_layer_types": None}),
        (
            "Phi-3-mini-128k",
            {"original_max_position_embeddings": ABSENT, "max_position_embeddings": 8192},
        ),
        ("MiniMax-M2", {"rotary_dim": ABSENT}),
        ("Llama-3-8B", {"is_causal": True, "per_layer_config": None}),
        ("Llama-3-8B", {"dtype": None, "torch_dtype": "float16"}),
        ("Llama-3.1-8B", {"original_max_position_embeddings": 16}),
        ("Mixtral-8x7B", {"num_experts": 8}),
        ("command-r7b-12-2024", {"use_qk_norm": False}),
    ],
)
def test_config_with_absent_or_null_keys_gives_the_logits_of_transformers(
    name: str, changes: dict[str, Any]
) -> None:
    assert outcome_of(changed(name, changes), run_seed()) == (ACCEPTED, "")


def test_config_fuzz_finds_a_model_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `is_causal` is taken to have no effect."""
    unsound = {**HARMLESS, "is_causal": (False,)}
    monkeypatch.setattr("rollout.models.config_keys.HARMLESS", unsound)
    outcome, explanation = outcome_of(PUBLISHED["Llama-3-8B"] | {"is_causal": False}, run_seed())
    assert outcome == "wrong"
    assert explanation.startswith("logits differ by")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_a_family_reads_has_a_kind_and_an_effect(family: str) -> None:
    read = READ | FAMILIES[family].read_keys
    assert read <= KINDS.keys()
    assert not read & (WITHOUT_EFFECT | FAMILIES[family].ignored)


@oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_of_a_family_are_those_of_its_config_class(family: str) -> None:
    config_class = type(AutoConfig.for_model(family))
    theirs = {field.name: field.default for field in fields(config_class)}
    thetas = config_class.default_theta
    if isinstance(thetas, dict):
        theirs |= {"rope_theta": thetas["global"], "rope_local_base_freq": thetas["local"]}
    else:
        theirs["rope_theta"] = thetas
    # What the code of these classes gives to keys that are no fields, or null.
    coded = {"partial_rotary_factor", "sliding_window_pattern", "rope_parameters"}
    coded |= {"num_nextn_predict_layers"}
    ours = {key: value for key, value in FAMILIES[family].defaults.items() if key not in coded}
    assert ours == {key: theirs[key] for key in ours}
    if "rope_theta" not in ours:
        assert theirs["rope_theta"] == DEFAULT_THETA


def test_refusals_name_the_key_and_the_remedy() -> None:
    outcome, message = outcome_of(PUBLISHED["Qwen3-0.6B"] | {"is_causal": None}, run_seed())
    assert outcome == REFUSED
    assert message == (
        "is_causal=None in the config is not known to the family 'qwen3'; if it has no effect on "
        "the model's outputs, set it to True, or remove it"
    )
