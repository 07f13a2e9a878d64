"""Our names for config keys of TRL, verl and Megatron-LM, for the error of an unknown key."""

from __future__ import annotations

_GROUP_SIZE = "algorithm.group_size"
_GROUPS_PER_STEP = "algorithm.groups_per_step"
_NUM_MINIBATCHES = "algorithm.num_minibatches"
_MAX_NEW_TOKENS = "algorithm.max_new_tokens"
_TEMPERATURE = "algorithm.temperature"
_NORMALIZATION = "algorithm.advantage_normalization"
_KIND = "the kind of loss, chosen with its group: algorithm=grpo, dapo, dr_grpo, gspo, cispo, ..."
_EPSILON = "algorithm.loss.epsilon_low and algorithm.loss.epsilon_high"
_EPSILON_HIGH = "algorithm.loss.epsilon_high"
_KL = "algorithm.loss.kl_coefficient"
_DUAL_CLIP = "algorithm.loss.dual_clip"
_LEARNING_RATE = "trainer.learning_rate"
_WARMUP_STEPS = "trainer.warmup_steps"
_NUM_STEPS = "trainer.num_steps"
_GRAD_NORM = "trainer.max_grad_norm"
_NUM_ITERATIONS = "algorithm.num_iterations"
_ENTROPY = "algorithm.loss.entropy_coefficient"
_REWARD_KL = "algorithm.reward_kl_coefficient"
_SYNC_INTERVAL = "algorithm.reference.sync_interval"
_SCHEDULER = "trainer.scheduler.path, with trainer.scheduler.options,"
_CHECKPOINTS = "trainer.checkpoint_interval"

_TRL = {
    "num_generations": _GROUP_SIZE,
    "generation_batch_size": f"{_GROUPS_PER_STEP}, times algorithm.group_size rollouts,",
    "per_device_train_batch_size": f"{_GROUPS_PER_STEP}, split by {_NUM_MINIBATCHES},",
    "steps_per_generation": _NUM_MINIBATCHES,
    "gradient_accumulation_steps": _NUM_MINIBATCHES,
    "loss_type": _KIND,
    "importance_sampling_level": _KIND,
    "epsilon": _EPSILON,
    "epsilon_high": f"{_EPSILON_HIGH} (for cispo the cap less 1)",
    "delta": _DUAL_CLIP,
    "num_iterations": _NUM_ITERATIONS,
    "mask_truncated_completions": "algorithm.mask_truncated_completions",
    "entropy_coef": _ENTROPY,
    "off_policy_mask_threshold": "algorithm.loss.max_sequence_kl",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    "sync_ref_model": f"set by {_SYNC_INTERVAL}",
    "ref_model_sync_steps": _SYNC_INTERVAL,
    "ref_model_mixup_alpha": "algorithm.reference.sync_weight",
    "lr_scheduler_type": _SCHEDULER,
    "beta": _KL,
    "temperature": _TEMPERATURE,
    "max_completion_length": _MAX_NEW_TOKENS,
    "scale_rewards": f"{_NORMALIZATION}=std or none",
    "learning_rate": _LEARNING_RATE,
    "warmup_steps": _WARMUP_STEPS,
    "max_steps": _NUM_STEPS,
    "max_grad_norm": _GRAD_NORM,
    "save_steps": _CHECKPOINTS,
    "max_staleness": "producer.max_staleness_versions",
}
_VERL = {
    "rollout.n": _GROUP_SIZE,
    "rollout.temperature": _TEMPERATURE,
    "actor.clip_ratio": _EPSILON,
    "actor.clip_ratio_low": "algorithm.loss.epsilon_low",
    "actor.clip_ratio_high": _EPSILON_HIGH,
    "actor.clip_ratio_c": _DUAL_CLIP,
    "actor.kl_loss_coef": _KL,
    "actor.policy_loss.loss_mode": _KIND,
    "actor.loss_agg_mode": "algorithm.loss.aggregation, which the kind of loss chooses,",
    "actor.loss_scale_factor": "algorithm.loss.max_completion_length",
    "actor.grad_clip": _GRAD_NORM,
    "actor.entropy_coeff": _ENTROPY,
    "actor.ppo_epochs": _NUM_ITERATIONS,
    "actor.ppo_max_token_len_per_gpu": "algorithm.max_tokens_per_forward",
    "actor.optim.lr_scheduler_type": _SCHEDULER,
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.target_modules",
    "model.use_remove_padding": "algorithm.is_packed",
    "algorithm.use_kl_in_reward": f"set by {_REWARD_KL}",
    "algorithm.kl_ctrl.kl_coef": _REWARD_KL,
    "actor.optim.lr": _LEARNING_RATE,
    "actor.optim.lr_warmup_steps": _WARMUP_STEPS,
    "actor.ppo_mini_batch_size": f"{_NUM_MINIBATCHES}, a number of parts,",
    "algorithm.adv_estimator": (
        f"{_NORMALIZATION}, algorithm.advantage_baseline and algorithm.advantage_estimator"
    ),
    "algorithm.norm_adv_by_std_in_grpo": f"{_NORMALIZATION}=std or none",
    "data.train_batch_size": _GROUPS_PER_STEP,
    "data.max_response_length": _MAX_NEW_TOKENS,
    "data.filter_overlong_prompts": "data.on_bad_row=skip",
    "data.max_prompt_length": "engine.max_sequence_length, of prompt and answer together,",
    "data.prompt_key": "data.prompt_column",
    "trainer.total_training_steps": _NUM_STEPS,
    "trainer.save_freq": _CHECKPOINTS,
    "trainer.project_name": "logger.wandb_project",
    "trainer.experiment_name": "run_name",
}
_MEGATRON = {
    "grpo_group_size": _GROUP_SIZE,
    "grpo_prompts_per_step": _GROUPS_PER_STEP,
    "grpo_clamp_eps_lower": "algorithm.loss.epsilon_low",
    "grpo_clamp_eps_upper": _EPSILON_HIGH,
    "grpo_kl_beta": _KL,
    "rl_default_temperature": _TEMPERATURE,
    "rl_importance_sampling_truncation_coef": (
        "algorithm.loss.correction.high, with its mode=truncate and algorithm.decoupled=true,"
    ),
    "lr": _LEARNING_RATE,
    "clip_grad": _GRAD_NORM,
    "train_iters": _NUM_STEPS,
    "save_interval": _CHECKPOINTS,
    "global_batch_size": f"{_NUM_MINIBATCHES}, a number of parts,",
}
_BY_SYSTEM = {"TRL": _TRL, "verl": _VERL, "Megatron-LM": _MEGATRON}


def hint_for(key: str) -> str | None:
    """A sentence with our name for `key` of another system; None if no system has it.

    A key may stand inside a part of a config ("algorithm.num_generations"), and those of verl below
    "actor_rollout_ref".
    """
    names = key.removeprefix("actor_rollout_ref.").split(".")
    for start in range(len(names)):
        name = ".".join(names[start:])
        for system, hints in _BY_SYSTEM.items():
            if name in hints:
                return f"{name} ({system}) is {hints[name]} here"
    return None
