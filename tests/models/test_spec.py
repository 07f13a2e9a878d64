"""ModelSpec from and to Hugging Face configs, and the configs that it refuses."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from rollout.errors import ModelError
from rollout.layers.latent_attention import LatentAttentionSpec, LatentDims
from rollout.layers.rope import RopeSpec
from rollout.models import CausalLM, ModelSpec
from rollout.models.families.registry import FAMILIES
from rollout.models.layout import layers_of
from rollout.worker.kv_cache import bytes_per_block
from tests.contracts.reference_attention import ReferenceAttention
from tests.family_cases import FAMILY_CASES, LONGROPE
from tests.family_table import PAGE, family_table
from tests.models.hf_models import CONFIG_CLASSES, LLAMA3_ROPE, YARN_ROPE, hf_config
from tests.tiny_models import full_logits, tiny_config

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


# As Moonlight-16B-A3B was published, without what has no effect.
MOONLIGHT = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "kv_lora_rank": 512,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
# The scaling of DeepSeek-V3 itself.
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


def test_from_hf_config_reads_every_field_of_v4() -> None:
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
def test_from_hf_config_reads_v4_and_v5_ropes_alike(
    family: str, scaling: dict[str, Any] | None
) -> None:
    v5 = hf_config(family, rope_theta=5e5, rope_scaling=scaling).to_dict()
    v4 = {key: value for key, value in v5.items() if key != "rope_parameters"}
    v4 |= {"rope_theta": 5e5, "rope_scaling": scaling}
    spec = ModelSpec.from_hf_config(v5)
    assert spec == ModelSpec.from_hf_config(v4)
    assert spec.rope.theta == 5e5
    assert spec.rope.kind == (scaling or {}).get("rope_type", "linear" if scaling else "default")


def test_documented_table_of_families_is_true() -> None:
    """After a change: `python -m tests.family_table`."""
    assert family_table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", CONFIG_CLASSES)
@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, YARN_ROPE])
def test_to_hf_config_reads_back_through_transformers(
    family: str, scaling: dict[str, Any] | None
) -> None:
    config = hf_config(family, rope_scaling=scaling, tie_word_embeddings=True, dtype="bfloat16")
    spec = ModelSpec.from_hf_config(config.to_dict())
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec
    through_transformers = CONFIG_CLASSES[family](**spec.to_hf_config()).to_dict()
    assert ModelSpec.from_hf_config(through_transformers) == spec


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {"layer_types": ["full_attention"] * 2}) for family in ("cohere2", "gpt_oss")),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("glm4", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}),
        ("phi3", {"rope_scaling": LONGROPE | {"attention_factor": 1.1}}),
    ],
)
def test_to_hf_config_leaves_no_default_to_transformers(
    family: str, changes: dict[str, Any]
) -> None:
    given = tiny_config(family, **(FAMILY_CASES[family] | changes))
    spec = ModelSpec.from_hf_config(given.to_dict())
    written = AutoConfig.for_model(**spec.to_hf_config())
    assert ModelSpec.from_hf_config(written.to_dict()) == spec
    assert len(full_logits(AutoModelForCausalLM.from_config(written), [1, 2])) == 2


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "ministral3"])
def test_rope_scaling_of_none_means_what_it_means_in_transformers(family: str) -> None:
    theirs = tiny_config(family, rope_scaling=None).to_dict()
    ours = {key: value for key, value in theirs.items() if key != "rope_parameters"}
    spec = ModelSpec.from_hf_config(ours | {"rope_scaling": None})
    assert spec == ModelSpec.from_hf_config(theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("theta", [{}, {"rope_theta": 7e5}])
def test_rope_scaling_beside_rope_parameters_means_what_it_means_in_transformers(
    family: str, theta: dict[str, float]
) -> None:
    """As where somebody adds a scaling to a config that transformers 5 has saved."""
    saved = tiny_config(family, **FAMILY_CASES[family]).to_dict()
    kind = LONGROPE if family == "phi3" else {"rope_type": "linear"}  # which knows no other
    saved |= {"rope_scaling": kind | {"factor": 3.0} | theta}
    theirs = AutoConfig.for_model(**deepcopy(saved)).to_dict()
    spec = ModelSpec.from_hf_config(saved)
    assert spec == ModelSpec.from_hf_config(theirs)
    assert (spec.rope.kind, spec.rope.factor) == (kind["rope_type"], 3.0)


def test_unknown_rope_type_is_refused_in_every_key() -> None:
    magic = {"type": "magic"}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    for rope in (
        {"rope_scaling": magic},
        {"rope_parameters": magic},
        {"rope_parameters": plain | magic},
        {"rope_parameters": plain, "rope_scaling": magic},
    ):
        with pytest.raises(ModelError, match="rope type 'magic' is not supported"):
            ModelSpec.from_hf_config(QWEN2_V4 | rope)
    for family in ("olmo3", "gemma3_text"):
        config = tiny_config(family, **FAMILY_CASES[family]).to_dict()
        with pytest.raises(ModelError, match="rope type 'magic' is not supported"):
            ModelSpec.from_hf_config(config | {"rope_scaling": magic})
        with pytest.raises(ModelError, match=r"rope_parameters.* must be per layer type"):
            ModelSpec.from_hf_config(config | {"rope_parameters": plain})


def test_yarn_attention_factor_follows_the_paper_unless_given() -> None:
    implied = ModelSpec.from_hf_config(hf_config("qwen3", rope_scaling=YARN_ROPE).to_dict())
    assert implied.rope.attention_factor == pytest.approx(1.1386294)
    given = YARN_ROPE | {"attention_factor": 1.5}
    explicit = ModelSpec.from_hf_config(hf_config("qwen3", rope_scaling=given).to_dict())
    assert explicit.rope.attention_factor == 1.5


def test_unused_sliding_window_is_ignored() -> None:
    config = QWEN2_V4 | {"use_sliding_window": True, "max_window_layers": 24}
    assert ModelSpec.from_hf_config(config) == ModelSpec.from_hf_config(QWEN2_V4)


def test_layer_types_give_windows_to_some_layers() -> None:
    config = QWEN2_V4 | {"use_sliding_window": True, "max_window_layers": 22}
    assert ModelSpec.from_hf_config(config).windows == (*[None] * 22, 32768, 32768)


def test_windows_without_layer_types_are_those_of_transformers() -> None:
    for family in ("ministral", "olmo3", "gemma2", "gemma3_text", "cohere2", "smollm3"):
        sizes = {"num_hidden_layers": 8, "sliding_window": 11}
        config = tiny_config(family, **(FAMILY_CASES[family] | sizes | {"layer_types": None}))
        theirs = config.to_dict()
        ours = {key: value for key, value in theirs.items() if key != "layer_types"}
        expected = ModelSpec.from_hf_config(theirs)
        assert ModelSpec.from_hf_config(ours) == expected
        is_sliding = [kind == "sliding_attention" for kind in theirs["layer_types"]]
        windows = expected.windows or (None,) * 8
        assert [window is not None for window in windows] == is_sliding, family


def test_latent_attention_config_is_read_and_written() -> None:
    spec = ModelSpec.from_hf_config(MOONLIGHT)
    assert spec.latent == LatentDims(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    assert spec.head_dim == 64
    assert spec.rope == RopeSpec(theta=50_000.0, is_interleaved=True)
    assert spec.moe_layers == tuple(range(1, 27))
    plain = ModelSpec.from_hf_config(MOONLIGHT | {"rope_interleave": False})
    for each in (spec, plain):
        assert ModelSpec.from_hf_config(each.to_hf_config()) == each


def test_cache_spec_of_latent_attention_has_576_numbers_per_token_and_layer() -> None:
    """Moonlight's heads would need 16 x (192 + 128), nine times as many."""
    spec = CausalLM(ModelSpec.from_hf_config(MOONLIGHT), "meta").cache_spec(64, torch.bfloat16)
    for attention in (ReferenceAttention(), TorchSdpaAttention()):
        assert bytes_per_block(attention, spec) == 27 * 64 * 576 * 2


def test_yarn_attention_scale_follows_mscale_all_dim() -> None:
    """As DeepSeek-V3's own code has it: 192^-0.5 (0.1 ln(40) + 1)^2; cosines have no factor."""
    spec = ModelSpec.from_hf_config(MOONLIGHT | {"rope_scaling": DEEPSEEK_YARN})
    assert spec.rope.attention_factor == 1.0
    mixers = [layer[0].mixer for layer in layers_of(spec)]
    scales = {mixer.scale for mixer in mixers if isinstance(mixer, LatentAttentionSpec)}
    assert [*scales] == [pytest.approx(0.1352337788608801)]
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func='softmax'.*'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"num_key_value_heads": 4}, "num_kv_heads=4 must be num_heads=16"),
        ({"attention_bias": True}, "attention_bias needs q_lora_rank"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63"),
        ({"v_head_dim": None}, "v_head_dim=None"),
        ({"sliding_window": 8}, "sliding_window=8"),
    ],
)
def test_latent_attention_config_that_would_run_wrongly_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf_config(MOONLIGHT | change)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_first_k_dense_replace_is_read_and_written(family: str) -> None:
    for count in range(4):
        sizes = FAMILY_CASES[family] | {"first_k_dense_replace": count}
        spec = ModelSpec.from_hf_config(tiny_config(family, **sizes).to_dict())
        assert spec.moe_layers == tuple(range(count, 3))
        assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec


def test_mlp_layer_types_are_dense_or_sparse() -> None:
    config = tiny_config("glm4_moe_lite", **FAMILY_CASES["glm4_moe_lite"]).to_dict()
    spec = ModelSpec.from_hf_config(config)
    assert spec.moe_layers == (1,)
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec
    assert ModelSpec.from_hf_config(config | {"mlp_layer_types": None}).moe_layers == (1, 2)
    for types in (["dense"], ["dense", "sparse", "mamba"]):
        with pytest.raises(ModelError, match="mlp_layer_types"):
            ModelSpec.from_hf_config(config | {"mlp_layer_types": types})


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(family: str) -> None:
    """Of which only sizes are said, and what a release decides for itself."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "max_position_embeddings": 256}
    is_latent = FAMILIES[family].has_latent_attention
    sizes |= {"num_key_value_heads": 4} if is_latent else {"num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"}
    known = experts & FAMILIES[family].read_keys
    theirs = AutoConfig.for_model(family, **sizes, **dict.fromkeys(known, 16)).to_dict()
    said = {*sizes, *experts, "model_type", "eos_token_id"}
    config = {key: value for key, value in theirs.items() if key in said}
    assert ModelSpec.from_hf_config(config) == ModelSpec.from_hf_config(theirs)


def test_keys_with_neutral_values_are_accepted() -> None:
    unset = {"attn_logit_softcapping": None, "mlp_bias": False, "_name_or_path": "x"}
    assert ModelSpec.from_hf_config(QWEN2_V4 | unset) == ModelSpec.from_hf_config(QWEN2_V4)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}}),
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 11}),
        ("cohere2", {"layer_switch": 4, "rotary_pct": 1.0, "use_parallel_block": True}),
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}),
        ("glm4_moe_lite", {"partial_rotary_factor": 1.0, "first_k_dense_replace": 1}),
        ("gpt_oss", {"experts_per_token": 2, "initial_context_length": 64}),
        ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False}),
        ("minimax_m2", {"scoring_func": "sigmoid", "use_mtp": True, "attn_type_list": [1, 1]}),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.02}),
    ],
)
def test_keys_without_effect_of_published_configs_are_accepted(
    family: str, keys: dict[str, Any]
) -> None:
    config = tiny_config(family, **FAMILY_CASES[family]).to_dict()
    assert ModelSpec.from_hf_config(config | keys) == ModelSpec.from_hf_config(config)


def test_older_configs_of_windowed_families_give_the_same_windows() -> None:
    """Gemma 3 as it was published: a pattern of layers, a local theta, a scaling of full layers."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"vocab_size": 97, "intermediate_size": 96, "max_position_embeddings": 256}
    published = {"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 6}
    scaling = {"rope_type": "linear", "factor": 8.0}
    published |= {"rope_scaling": scaling, "rope_local_base_freq": 10_000.0, "rope_theta": 1e6}
    spec = ModelSpec.from_hf_config(sizes | published)
    assert spec.windows == (*[512] * 5, None, 512)
    full = RopeSpec(theta=1e6, kind="linear", factor=8.0)
    assert spec.rope == full
    assert spec.ropes == (*[RopeSpec(theta=10_000.0)] * 5, full, RopeSpec(theta=10_000.0))
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba'.*llama.*qwen2, .*qwen3"),
        ({"model_type": None}, "None is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "lists 2 layers"),
        ({"layer_types": ["linear_attention"] * 24}, "'linear_attention'.*'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 24}, "use_sliding_window=False"),
        ({"attention_multiplier": 0.5}, "attention_multiplier=0.5.*'qwen2'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0.*remove it"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor=None"),
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
        ({"rope_parameters": 3}, "rope_parameters=3 in the config must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn' in the config must be an object"),
        ({"rope_theta": "x"}, "rope_theta='x' in the config must be a positive number"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' must be a number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x' in the config must be a number from 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"eos_token_id": "x"}, "eos_token_id='x' in the config must be a token id"),
        ({"eos_token_id": [1, "x"]}, r"eos_token_id=\[1, 'x'\] in the config"),
    ],
)
def test_from_hf_config_refuses_configs_that_would_run_wrongly(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf_config(QWEN2_V4 | change)


@pytest.mark.parametrize("family", ["olmo3", "gemma3_text"])
def test_ropes_by_layer_type_refuse_settings_that_transformers_ignores(
    family: str,
) -> None:
    """Of yarn's ramp it reads `truncate` beside the layer types, where nothing else stands."""
    config = tiny_config(family, **FAMILY_CASES[family]).to_dict()
    full = config["rope_parameters"]["full_attention"]
    config["rope_parameters"]["full_attention"] = YARN_ROPE | full | {"truncate": True}
    ModelSpec.from_hf_config(config)
    config["rope_parameters"]["full_attention"]["truncate"] = False
    with pytest.raises(ModelError, match=r"truncate=False.*full_attention"):
        ModelSpec.from_hf_config(config)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3_moe", {"num_experts": 0}, "num_experts=0 in the config must be a positive integer"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "experts_per_token=9 exceeds the 8"),
        ("qwen3_moe", {"num_experts": None}, "num_experts=None in the config must be a positive"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("glm4_moe", {"first_k_dense_replace": None}, "first_k_dense_replace=None"),
        ("glm4_moe", {"n_group": None}, "n_group=None"),
        ("glm4_moe", {"n_shared_experts": None}, "n_shared_experts=None"),
        ("glm4_moe", {"routed_scaling_factor": None}, "routed_scaling_factor=None"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit=None"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm=False.*supported: True"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0.*'olmoe'"),
        ("mixtral", {"n_shared_experts": 1}, "n_shared_experts=1.*'mixtral'"),
        ("gpt_oss", {"hidden_act": "gelu_pytorch_tanh"}, "'gelu_pytorch_tanh' is not supported"),
        ("glm4_moe", {"n_group": 3}, "num_experts=8 must make num_expert_groups=3"),
        ("glm4_moe", {"n_group": 8}, "num_expert_groups=8 equal groups of two or more"),
        ("glm4_moe", {"topk_group": 5}, "num_chosen_groups=5"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "experts_per_token=5 exceeds the 4"),
    ],
)
def test_from_hf_config_refuses_mixtures_that_would_run_wrongly(
    family: str, change: dict[str, Any], message: str
) -> None:
    config = tiny_config(family, **FAMILY_CASES[family]).to_dict() | change
    if "num_experts" in change:
        del config["num_local_experts"]
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf_config(config)


@pytest.mark.parametrize(("changes", "layers"), [({}, (1, 3)), ({"mlp_only_layers": [3]}, (1,))])
def test_decoder_sparse_step_gives_experts_to_every_nth_layer(
    changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    sizes = FAMILY_CASES["qwen3_moe"] | {"num_hidden_layers": 4, "mlp_only_layers": []}
    config = tiny_config("qwen3_moe", **(sizes | {"decoder_sparse_step": 2} | changes)).to_dict()
    spec = ModelSpec.from_hf_config(config)
    assert (spec.moe_layers, spec.num_moe_layers) == (layers, len(layers))
    assert ModelSpec.from_hf_config(spec.to_hf_config()) == spec


def test_to_hf_config_refuses_a_spec_that_the_family_cannot_express() -> None:
    spec = replace(ModelSpec.from_hf_config(QWEN2_V4), attention_bias=False)
    with pytest.raises(ModelError, match="attention_bias"):
        spec.to_hf_config()
