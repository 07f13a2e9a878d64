"""Translates the settings of a TRL GRPOTrainer to SamplingParams, and refuses unsupported ones.

Used by `trainer_hooks.trl_rollouts`. The tables cover every field of GRPOConfig in TRL 1.16 and
every setting of `generation_kwargs`. Each one is used, refused or without effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rollout import SamplingParams
from rollout.errors import ConfigError
from rollout.foreign_settings import RefusedSetting, unknown_changes

logger = logging.getLogger(__name__)

# Fields of GRPOConfig that decide what is generated. GRPOTrainer copies most of them to its own
# attributes. It applies num_generations itself by passing each prompt once per sample.
USED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length"),
        *("generation_kwargs", "chat_template_kwargs", "num_generations", "num_generations_eval"),
    }
)

_OWN_SERVER = "TRLRollouts generates in this process; leave it out, or pass no rollout_func"
_OF_TRANSFORMERS = "it is a setting of transformers' generate(); leave it out"

REFUSED: Mapping[str, RefusedSetting] = {
    "use_vllm": RefusedSetting(
        (False,), "it starts vLLM beside this engine; leave it out and call TRLRollouts.attach"
    ),
    "vllm_mode": RefusedSetting(("colocate",), _OWN_SERVER),
    "vllm_server_base_url": RefusedSetting((None,), _OWN_SERVER),
    "vllm_server_host": RefusedSetting(("0.0.0.0",), _OWN_SERVER),
    "vllm_server_port": RefusedSetting((8000,), _OWN_SERVER),
    "vllm_server_timeout": RefusedSetting((240.0,), _OWN_SERVER),
    "vllm_group_port": RefusedSetting((51216,), _OWN_SERVER),
    "vllm_model_impl": RefusedSetting(("vllm",), "the engine has models of its own; leave it out"),
    "vllm_structured_outputs_regex": RefusedSetting(
        (None,), "the engine cannot constrain text by a grammar; leave it out"
    ),
    "vllm_gpu_memory_utilization": RefusedSetting(
        (0.3,), "give the LLM InferenceConfig(buffer_size_gb=...), an amount"
    ),
    "vllm_max_model_length": RefusedSetting(
        (None,), "give the LLM InferenceConfig(max_sequence_length=...)"
    ),
    "vllm_tensor_parallel_size": RefusedSetting(
        (1,), "give the LLM InferenceConfig(tensor_parallel_size=...)"
    ),
    "cache_implementation": RefusedSetting((None,), _OF_TRANSFORMERS),
    "use_transformers_continuous_batching": RefusedSetting((False,), _OF_TRANSFORMERS),
    "transformers_continuous_batching_config": RefusedSetting((None,), _OF_TRANSFORMERS),
    "use_transformers_paged": RefusedSetting((False,), _OF_TRANSFORMERS),
}

# Fields of GRPOConfig without an effect on what is generated, by the reason.
NO_EFFECT: Mapping[str, frozenset[str]] = {
    "which prompts the trainer asks for, and when": frozenset(
        {
            *("shuffle_dataset", "generation_batch_size", "steps_per_generation", "data_seed"),
            *("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs"),
            *("max_steps", "gradient_accumulation_steps", "auto_find_batch_size"),
            *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
            *("dataloader_persistent_workers", "dataloader_prefetch_factor"),
            *("dataloader_multiprocessing_context", "dataloader_in_order", "ignore_data_skip"),
            *("remove_unused_columns", "train_sampling_strategy", "length_column_name"),
            *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "do_train", "do_eval"),
            *("do_predict", "prediction_loss_only", "label_names"),
        }
    ),
    "the seeds of an engine follow from its own seed": frozenset({"seed", "full_determinism"}),
    "the policy in the trainer, whose weights are pushed; the LLM was made from one of its own": (
        frozenset(
            {
                *("model_init_kwargs", "trust_remote_code", "disable_dropout", "use_cache"),
                *("cast_lm_head_to_fp32", "router_aux_loss_coef", "ds3_gather_for_generation"),
                *("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "use_cpu"),
                *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
                *("activation_checkpointing", "activation_checkpointing_kwargs"),
                *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
                *("use_liger_kernel", "liger_kernel_config", "neftune_noise_alpha"),
                *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
                *("ddp_static_graph", "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config"),
                *("deepspeed", "accelerator_config", "parallelism_config", "local_rank"),
                *("torch_empty_cache_steps", "pad_to_multiple_of"),
            }
        )
    ),
    "the engine is always suspended between two generations": frozenset({"vllm_enable_sleep_mode"}),
    "tools are refused, and a completion is one turn": frozenset({"max_tool_calling_iterations"}),
    "the loss and the optimizer": frozenset(
        {
            *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim"),
            *("optim_args", "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2"),
            *("adam_epsilon", "average_tokens_across_devices", "max_grad_norm"),
            *("label_smoothing_factor", "beta", "num_iterations", "epsilon", "delta"),
            *("epsilon_high", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos"),
            *("vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level"),
            *("reward_weights", "multi_objective_aggregation", "scale_rewards", "loss_type"),
            *("mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha"),
            *("ref_model_sync_steps", "top_entropy_quantile", "entropy_coef"),
            *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
            *("entropy_target", "off_policy_mask_threshold", "use_bias_correction_kl"),
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
            *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
            "vllm_importance_sampling_cap",
        }
    ),
    "logs, evaluation and files": frozenset(
        {
            *("output_dir", "logging_strategy", "logging_steps", "logging_first_step"),
            *("log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
            *("log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
            *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
            *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
            *("include_for_metrics", "batch_eval_metrics", "save_only_model", "save_strategy"),
            *("save_steps", "save_on_each_node", "save_total_limit", "enable_jit_checkpoint"),
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
            *("hub_always_push", "hub_revision", "load_best_model_at_end"),
            *("metric_for_best_model", "greater_is_better"),
            *("restore_callback_states_from_checkpoint", "resume_from_checkpoint", "debug"),
            *("skip_memory_metrics", "log_completions", "log_multimodal"),
            *("num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo"),
        }
    ),
}
_KNOWN = frozenset().union(USED, REFUSED, *NO_EFFECT.values())


# Fields of SamplingParams that each setting of `generation_kwargs` becomes. Settings have the names
# of transformers and of vLLM. `_end_token_fields` translates the settings in `_ENDS`.
_GENERATION: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "temperature": lambda value: {"temperature": value},
    "top_p": lambda value: {"top_p": 0.0 if value == 1 else value},  # 1.0 is off
    "top_k": lambda value: {"top_k": 0 if value == -1 else value},  # vLLM's -1 is off
    "min_p": lambda value: {"min_p": value},
    "repetition_penalty": lambda value: {"repetition_penalty": value},
    "presence_penalty": lambda value: {"presence_penalty": value},
    "frequency_penalty": lambda value: {"frequency_penalty": value},
    "max_new_tokens": lambda value: {"num_tokens_to_generate": value},
    "max_tokens": lambda value: {"num_tokens_to_generate": value},
    "min_new_tokens": lambda value: {"min_tokens": value},
    "min_tokens": lambda value: {"min_tokens": value},
    "stop": lambda value: {"stop_words": value},
    "stop_strings": lambda value: {"stop_words": value},
    "logit_bias": lambda value: {"logit_bias": value},
    "allowed_token_ids": lambda value: {"allowed_token_ids": value},
}
_ENDS = ("eos_token_id", "stop_token_ids", "ignore_eos")
# Settings that change only the text, or only how transformers computes the same tokens.
_GENERATION_WITHOUT_EFFECT = frozenset(
    {
        *("pad_token_id", "bos_token_id", "use_cache", "disable_compile", "compile_config"),
        *("low_memory", "prefill_chunk_size", "max_cache_len", "logprobs", "detokenize"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    }
)
# Values at which the other settings have no effect. None has no effect for any setting.
_GENERATION_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "n", "best_of"), 1),
    **dict.fromkeys(("typical_p", "length_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("early_stopping", "renormalize_logits", "remove_invalid_values"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores"), False),
    **dict.fromkeys(("output_logits", "return_dict_in_generate", "token_healing"), False),
    "do_sample": True,
    "guidance_scale": 1.0,
}
# What to use instead of a refused setting, for the error message.
_GENERATION_REMEDIES: Mapping[str, str] = {
    "suppress_tokens": "logit_bias with -100 for these tokens",
    "sequence_bias": "logit_bias for single tokens",
    "max_length": "max_new_tokens",
    "seed": "the seed of the LLM",
    "n": "num_generations of GRPOConfig",
    "num_return_sequences": "num_generations of GRPOConfig",
    "do_sample": "temperature and top_k: the probability of a greedy token cannot be trained",
}


def sampling_params_of(trainer: Any) -> SamplingParams:
    """Return the SamplingParams that the settings of a GRPOTrainer request.

    The engine returns the log-probs of the sampled distribution (mode "processed"). The trainer
    computes the policy's log-probs itself, and weighs tokens by the ratio of both.
    Completions end at the end tokens of the engine and of the trainer's tokenizer and model, unless
    `generation_kwargs` sets others. As in TRL, `generation_kwargs` overrides fields of the same
    meaning. Raises ConfigError for settings of `generation_kwargs` that an engine cannot follow.
    """
    given: dict[str, Any] = {
        "temperature": trainer.temperature,
        "top_p": 1.0 if trainer.top_p is None else trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "max_new_tokens": trainer.max_completion_length,
        **(trainer.args.generation_kwargs or {}),
    }
    # vLLM's name of the same setting, in `generation_kwargs`, overrides max_completion_length.
    if given.get("max_tokens") is not None:
        del given["max_new_tokens"]
    fields = _end_token_fields(trainer, given)
    for name, value in given.items():
        if value is None or name in _GENERATION_WITHOUT_EFFECT:
            continue
        if (convert := _GENERATION.get(name)) is not None:
            fields |= convert(value)
        elif value != _GENERATION_NEUTRAL.get(name):
            raise _unknown_generation_setting(name, value)
    return SamplingParams(**fields, return_log_probs=True, logprobs_mode="processed")


def check_trainer(trainer: Any) -> None:
    """Raise ConfigError for a GRPOTrainer that TRLRollouts cannot serve.

    TRLRollouts refuses settings by the table REFUSED, tools, environments and vision-language
    models. A warning is logged for fields that no table names and that differ from their default.
    """
    args = trainer.args
    for name, refused in REFUSED.items():
        value = getattr(args, name, None)
        if refused.is_asked_by(value):
            raise ConfigError(f"GRPOConfig({name}={value!r}) with TRLRollouts: {refused.remedy}")
    if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None):
        raise ConfigError(
            "GRPOTrainer(tools=..., environment_factory=...): TRLRollouts answers each prompt by "
            "one turn; leave them out, or train with an environment of trainer_hooks"
        )
    if getattr(trainer, "_is_vlm", False):
        raise ConfigError(
            "GRPOTrainer of a vision-language model with TRLRollouts: the engine has models of "
            "text only; train it without a rollout_func"
        )
    if new := unknown_changes(args, _KNOWN):
        logger.warning("GRPOConfig has settings that TRLRollouts does not know: %s", ", ".join(new))


def _end_token_fields(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Remove the end-token settings from `given` and return them as fields of SamplingParams.

    A given `eos_token_id` replaces the end tokens of the trainer and of the engine, as in
    transformers. Otherwise completions end at the trainer's `eos_token_ids`, unless `ignore_eos` is
    set. A given `stop_token_ids` is always added.
    """
    more = list(given.pop("stop_token_ids", None) or ())
    eos, ignores = given.pop("eos_token_id", None), given.pop("ignore_eos", None)
    if eos is not None:
        own = list(eos) if isinstance(eos, (list, tuple)) else [eos]
        return {"termination_id": -1, "stop_token_ids": [*own, *more]}
    own = [token_id for token_id in trainer.eos_token_ids if token_id is not None]
    return {"ignore_eos": bool(ignores), "stop_token_ids": [*(() if ignores else own), *more]}


def _unknown_generation_setting(name: str, value: Any) -> ConfigError:
    remedy = _GENERATION_REMEDIES.get(name)
    if remedy is None:
        remedy = f"one of {', '.join((*_GENERATION, *_ENDS))}, or leave it out"
    return ConfigError(
        f"generation_kwargs={{{name!r}: {value!r}}} with TRLRollouts: the engine has no such "
        f"setting; use {remedy}"
    )
