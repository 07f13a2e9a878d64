"""Checks of a Hugging Face config: which keys a family reads, and which values they can have.

Used by `rollout.models.spec`. A key that the family does not read is refused by name. Exceptions
are keys without effect in inference, and values with which transformers computes the same as
without the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import ModelError
from rollout.models.config_values import (
    ANY,
    COUNT,
    COUNTS,
    EPSILON,
    FLAG,
    NAME,
    NAMES,
    NUMBER,
    OBJECT,
    POSITIVE,
    SIZE,
    SWITCHES,
    Kind,
)
from rollout.models.family import Family, Key
from rollout.models.quantization import quant_method_of

# Keys that ModelSpec reads in every family.
READ = frozenset(
    {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"),
        *("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
        *("eos_token_id", "dtype", "torch_dtype"),
    }
)
# Keys without effect on a model's logits in any family: training, names, sampling defaults, how
# transformers computes, and what its forward pass returns besides logits.
WITHOUT_EFFECT = frozenset(
    {
        *("model_type", "quantization_config"),  # read before all others
        *("architectures", "auto_map", "transformers_version", "tokenizer_class", "name_or_path"),
        *("bos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "prefix"),
        "decoder_start_token_id",
        *("initializer_range", "use_cache", "attention_dropout", "hidden_dropout", "embd_pdrop"),
        *("resid_pdrop", "residual_dropout", "attn_pdrop", "pretraining_tp"),
        *("use_bfloat16", "return_dict", "output_attentions", "output_hidden_states"),
        *("output_scores", "torchscript", "tie_last_hidden_states", "num_labels", "is_decoder"),
        *("return_dict_in_generate", "id2label", "label2id", "problem_type", "finetuning_task"),
        *("task_specific_params", "chunk_size_feed_forward", "attn_implementation"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
        *("num_beam_groups", "diversity_penalty", "top_k", "top_p", "typical_p", "length_penalty"),
        *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("num_return_sequences", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "tf_legacy_loss", "gradient_checkpointing"),
        *("unsloth_fixed", "unsloth_version", "experts_implementation", "is_llama_config"),
        *("transformers.js_config", "model_max_length", "cache_implementation"),
        *("_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset"),
        "_model_name_or_path",  # set by transformers for a model read from a GGUF file
        *("_attn_implementation_internal", "_experts_implementation", "_flash_attn_2_enabled"),
        *("_experts_implementation_internal", "_sliding_window_pattern"),
    }
)
# For keys that a family does not read: the values with which transformers computes the same as
# without the key. With another value it computes something else, or ignores a setting with which
# the model was trained.
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "use_bidirectional_attention": (None, False),
    "per_layer_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "layer_types": (None,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "use_qk_norm": (False,),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
}


KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *("intermediate_size", "max_position_embeddings", "original_max_position_embeddings"),
            *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "shared_expert_intermediate_size", "n_group", "topk_group"),
            *("decoder_sparse_step", "sliding_window_pattern", "no_rope_layer_interval"),
            *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"),
            "n_shared_experts",  # transformers has tensors without elements where it is 0
        ),
        SIZE,
    ),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "q_lora_rank"), SIZE.or_null),
    **dict.fromkeys(
        (
            *("first_k_dense_replace", "max_window_layers"),
            *("num_nextn_predict_layers", "num_mtp_layers"),
        ),
        COUNT,
    ),
    # Configs whose layers have no window have 0.
    "sliding_window": COUNT.or_null,
    **dict.fromkeys(
        (
            *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
            *("logit_scale", "swiglu_alpha", "swiglu_limit", "routed_scaling_factor"),
        ),
        NUMBER,
    ),
    **dict.fromkeys(
        (
            *("rope_theta", "rope_local_base_freq", "partial_rotary_factor"),
            *("query_pre_attn_scalar", "logits_scaling"),
        ),
        POSITIVE,
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), POSITIVE.or_null),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), EPSILON),
    **dict.fromkeys(
        (
            *("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias"),
            *("qkv_bias", "use_qk_norm", "norm_topk_prob", "use_sliding_window"),
            "rope_interleave",
        ),
        FLAG,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation"), NAME),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), NAMES.or_null),
    "mlp_only_layers": COUNTS.or_null,
    "no_rope_layers": SWITCHES.or_null,
    **dict.fromkeys(("rope_scaling", "rope_parameters"), OBJECT.or_null),
    **dict.fromkeys(("eos_token_id", "dtype", "torch_dtype"), ANY),
}


def read_keys(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the values of the keys that `family` reads. An absent key has the family's default.

    The value of a key's alias is returned under the key's name. As in transformers, a null
    `rope_parameters` or `rope_scaling` counts as absent. Raises ModelError for an unknown key, for
    a value that the family cannot use, for a key and its alias with different values, and for an
    unsupported `quantization_config`.
    """
    quant_method_of(config)
    for key in sorted(config):
        _check(key, config[key], family)
    said = {key: value for key, value in config.items() if key in READ | family.read_keys}
    for rule in family.values.values():
        if isinstance(rule, Key) and rule.alias in said:
            value = said.pop(rule.alias)
            if said.setdefault(rule.name, value) != value:
                raise ModelError(
                    f"{rule.alias}={value!r} and {rule.name}={said[rule.name]!r} in the config "
                    "name one setting; remove either"
                )
    for key in ("rope_parameters", "rope_scaling"):
        if key in said and said[key] is None:
            del said[key]
    return {**family.defaults, **said}


def _check(key: str, value: Any, family: Family) -> None:
    if key in family.fixed:
        if value not in family.fixed[key]:
            raise ModelError(
                f"{key}={value!r} is not supported in the family {family.name!r}; supported: "
                f"{' or '.join(map(repr, family.fixed[key]))}"
            )
    elif key in READ or key in family.read_keys:
        if not KINDS[key].accepts(value):
            raise ModelError(f"{key}={value!r} in the config must be {KINDS[key].name}")
    elif key not in WITHOUT_EFFECT and key not in family.ignored:
        harmless = HARMLESS.get(key, ())
        if value not in harmless:
            remedy = f"set it to {harmless[0]!r}, or remove it" if harmless else "remove it"
            raise ModelError(
                f"{key}={value!r} in the config is not known to the family {family.name!r}; "
                f"if it has no effect on the model's outputs, {remedy}"
            )


def activation_of(config: Mapping[str, Any], family: Family) -> str:
    """Return ModelSpec's name of the config's activation. A config without one has the family's
    first activation. Raises ModelError for an activation that the family does not support."""
    key, names = family.activation_key, family.activations
    name = config.get(key, next(iter(names)))
    if name not in names:
        raise ModelError(f"{key}={name!r} is not supported; supported: {', '.join(names)}")
    return names[name]


def activation_to_hf(activation: str, family: Family) -> str:
    """Return transformers' name of ModelSpec's `activation`. Raises ModelError if the family does
    not support it."""
    names = [name for name, own in family.activations.items() if own == activation]
    if not names:
        raise ModelError(f"a {family.name!r} config cannot express activation={activation!r}")
    return names[0]
