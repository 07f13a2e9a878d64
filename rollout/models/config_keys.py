"""Which keys of a config a family knows. Any other that may have an effect is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import ModelError
from rollout.models.family import Family
from rollout.models.quantization import quant_method_of

# What ModelSpec reads in every family.
_READ = frozenset(
    {
        *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
        *("eos_token_id", "dtype", "torch_dtype", "original_max_position_embeddings"),
        "quantization_config",
    }
)
# What has no effect on the outputs of a model in inference: training, names, defaults of sampling,
# and what a forward pass returns besides logits.
_WITHOUT_EFFECT = frozenset(
    {
        *("architectures", "auto_map", "transformers_version", "tokenizer_class", "name_or_path"),
        *("bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
        *("initializer_range", "use_cache", "attention_dropout", "hidden_dropout", "embd_pdrop"),
        *("resid_pdrop", "residual_dropout", "pretraining_tp", "cache_implementation"),
        *("use_bfloat16", "return_dict", "output_attentions", "output_hidden_states"),
        *("output_scores", "torchscript"),
        *("return_dict_in_generate", "id2label", "label2id", "problem_type", "finetuning_task"),
        *("task_specific_params", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
        *("num_beam_groups", "diversity_penalty", "top_k", "top_p", "typical_p", "length_penalty"),
        *("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("num_return_sequences", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "pruned_heads", "tf_legacy_loss", "gradient_checkpointing"),
        *("unsloth_fixed", "unsloth_version", "attn_implementation", "max_window_layers"),
        *("is_llama_config", "transformers.js_config", "model_max_length", "attn_pdrop"),
    }
)


def refuse_unknown(config: Mapping[str, Any], family: Family) -> None:
    """Raise ModelError naming a key that `family` does not know and that may change outputs, or one
    whose value it does not support.

    Keys that are unset (None, False, 0 or empty) and private ones ("_name") pass.
    """
    quant_method_of(config)
    known = _READ | _WITHOUT_EFFECT | family.known_keys
    for key in sorted(config.keys() - known):
        if config[key] and not key.startswith("_"):
            raise ModelError(
                f"{key}={config[key]!r} in the config is not known to the family {family.name!r}; "
                "if it has no effect on the model's outputs, remove it from the config"
            )
    for key, value in family.fixed.items():
        if config.get(key, value) != value:
            raise ModelError(
                f"{key}={config[key]!r} is not supported in the family {family.name!r}; "
                f"supported: {value!r}"
            )


def activation_of(config: Mapping[str, Any], family: Family) -> str:
    """Our name of the gated activation. Raises ModelError for one that is not supported."""
    key, names = family.activation_key, family.activations
    name = config.get(key) or next(iter(names))
    if name not in names:
        raise ModelError(f"{key}={name!r} is not supported; supported: {', '.join(names)}")
    return names[name]


def activation_to_hf(activation: str, family: Family) -> str:
    """The name that transformers has for it. Raises ModelError where the family has none."""
    names = [name for name, own in family.activations.items() if own == activation]
    if not names:
        raise ModelError(f"a {family.name!r} config cannot express activation={activation!r}")
    return names[0]
