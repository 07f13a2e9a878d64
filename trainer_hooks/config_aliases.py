"""Config keys of TRL, verl and Megatron-LM, and ours for the same settings: one table.

A target is a whole key; in a config of another shape its longest tail that exists there counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.config_loss_kinds import (
    AGGREGATION,
    BASELINE,
    DUAL_CLIP,
    EPSILON_HIGH,
    EPSILON_LOW,
    LOSS_KIND,
    MAX_COMPLETION_LENGTH,
    NORMALIZATION,
    Read,
    caps_weight,
    trl_epsilon_high,
    trl_kind,
    trl_ratio_level,
    verl_aggregation,
    verl_estimator,
    verl_loss_mode,
)

Convert = Callable[[Any, Read], Mapping[str, Any]]

GROUP_SIZE = "algorithm.group_size"
GROUPS_PER_STEP = "algorithm.groups_per_step"
MINIBATCHES = "algorithm.num_minibatches"
DECOUPLED = "algorithm.decoupled"
MAX_NEW_TOKENS = "algorithm.max_new_tokens"
TEMPERATURE = "algorithm.temperature"
KL = "algorithm.loss.kl_coefficient"
CORRECTION_MODE = "algorithm.loss.correction.mode"
CORRECTION_HIGH = "algorithm.loss.correction.high"
LEARNING_RATE = "trainer.learning_rate"
WARMUP_STEPS = "trainer.warmup_steps"
NUM_STEPS = "trainer.num_steps"
CHECKPOINTS = "trainer.checkpoint_interval"
GRAD_NORM = "trainer.max_grad_norm"
STALENESS = "producer.max_staleness_versions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """`names` of `system` for one setting; `convert` gives our keys and values.

    `targets`: every key it may set. `weak_targets`: those that anything else given sets instead,
    and that a config may lack.
    """

    system: str
    names: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Convert
    weak_targets: tuple[str, ...] = ()


def _same(system: str, names: str, target: str) -> Alias:
    """Another name, same meaning; `names` are separated by spaces."""

    def convert(value: Any, read: Read) -> Mapping[str, Any]:
        return {target: value}

    return _several(system, names, (target,), convert)


def _several(
    system: str,
    names: str,
    targets: tuple[str, ...],
    convert: Convert,
    weak_targets: tuple[str, ...] = (),
) -> Alias:
    """It stands for several of our settings, or for one that depends on others."""
    return Alias(
        system=system,
        names=tuple(names.split()),
        targets=targets,
        convert=convert,
        weak_targets=weak_targets,
    )


def _both_sides(system: str, names: str) -> Alias:
    """One clip constant for both sides; the upper one counts only if nothing else gives it."""

    def convert(value: Any, read: Read) -> Mapping[str, Any]:
        if system == "TRL" and caps_weight(read):
            raise ConfigError("kind='cispo' has no lower bound on its weight; leave epsilon out")
        return {EPSILON_LOW: value, EPSILON_HIGH: value}

    return _several(system, names, (EPSILON_LOW, EPSILON_HIGH), convert, (EPSILON_HIGH,))


def _choice(system: str, names: str, choices: Mapping[Any, Mapping[str, Any]]) -> Alias:
    """Values have other names too, and may stand for several of our settings."""
    targets = tuple(dict.fromkeys(key for chosen in choices.values() for key in chosen))

    def convert(value: Any, read: Read) -> Mapping[str, Any]:
        if value not in choices:
            known = ", ".join(str(choice) for choice in choices)
            raise ConfigError(f"{value!r} has no counterpart here; those with one: {known}")
        return choices[value]

    return _several(system, names, targets, convert)


def _computed(system: str, names: str, target: str, compute: Callable[[Any, Read], Any]) -> Alias:
    """Our setting counts something else; it follows from this one and others."""

    def convert(value: Any, read: Read) -> Mapping[str, Any]:
        return {target: compute(value, read)}

    return _several(system, names, (target,), convert)


def _divided(amount: int, by: int, what: str) -> int:
    if by < 1 or amount % by:
        raise ConfigError(f"{what}: {amount} is not a multiple of {by}")
    return amount // by


def _groups_of_rollouts(num_rollouts: int, read: Read) -> int:
    return _divided(num_rollouts, read(GROUP_SIZE), "rollouts of a step by the group size")


def _groups_of_device_batches(batch_size: int, read: Read) -> int:
    steps = read("steps_per_generation") or read("gradient_accumulation_steps") or 1
    return _groups_of_rollouts(batch_size * steps, read)


def _minibatches_of_steps(steps: int, read: Read) -> int:
    accumulated = read("gradient_accumulation_steps") or 1
    return _divided(steps, accumulated, "steps_per_generation by gradient_accumulation_steps")


def _minibatches_of_accumulation(accumulated: int, read: Read) -> int:
    # TRL generates once per optimizer step unless it is told otherwise.
    return _minibatches_of_steps(read("steps_per_generation") or accumulated, read)


def _minibatches_of_prompts(num_prompts: int, read: Read) -> int:
    return _divided(read(GROUPS_PER_STEP), num_prompts, "prompts of a step by those of a minibatch")


def _minibatches_of_rollouts(num_rollouts: int, read: Read) -> int:
    step_rollouts = read(GROUPS_PER_STEP) * read(GROUP_SIZE)
    return _divided(step_rollouts, num_rollouts, "rollouts of a step by those of a minibatch")


def _truncation(high: float, read: Read) -> Mapping[str, Any]:
    return {CORRECTION_MODE: "truncate", CORRECTION_HIGH: high, DECOUPLED: True}


def _verl(name: str) -> str:
    """verl's key, with and without the part that all of its workers share."""
    return f"{name} actor_rollout_ref.{name}"


_STD, _NONE = {NORMALIZATION: "std"}, {NORMALIZATION: "none"}

# In the order of translation: a computed one reads what those before it have set.
ALIASES = (
    # the kind of loss, which other names depend on
    _several("TRL", "loss_type", (LOSS_KIND,), trl_kind),
    _several("TRL", "importance_sampling_level", (LOSS_KIND,), trl_ratio_level),
    _several("verl", _verl("actor.policy_loss.loss_mode"), (LOSS_KIND,), verl_loss_mode),
    _several(
        "verl",
        _verl("actor.loss_agg_mode"),
        (LOSS_KIND, AGGREGATION, MAX_COMPLETION_LENGTH),
        verl_aggregation,
    ),
    # TRL: GRPOConfig, and AsyncGRPOConfig for the last two; on one process
    _same("TRL", "num_generations", GROUP_SIZE),
    _both_sides("TRL", "epsilon"),
    _computed("TRL", "epsilon_high", EPSILON_HIGH, trl_epsilon_high),
    _same("TRL", "delta", DUAL_CLIP),
    _same("TRL", "beta", KL),
    _same("TRL", "temperature", TEMPERATURE),
    _same("TRL", "max_completion_length", MAX_NEW_TOKENS),
    _choice("TRL", "scale_rewards", {"group": _STD, "none": _NONE, True: _STD, False: _NONE}),
    _same("TRL", "learning_rate", LEARNING_RATE),
    _same("TRL", "warmup_steps", WARMUP_STEPS),
    _same("TRL", "max_steps", NUM_STEPS),
    _same("TRL", "max_grad_norm", GRAD_NORM),
    _same("TRL", "save_steps", CHECKPOINTS),
    _same("TRL", "max_staleness", STALENESS),
    # verl
    _same("verl", _verl("rollout.n"), GROUP_SIZE),
    _same("verl", _verl("rollout.temperature"), TEMPERATURE),
    _both_sides("verl", _verl("actor.clip_ratio")),
    _same("verl", _verl("actor.clip_ratio_low"), EPSILON_LOW),
    _same("verl", _verl("actor.clip_ratio_high"), EPSILON_HIGH),
    _same("verl", _verl("actor.clip_ratio_c"), DUAL_CLIP),
    _same("verl", _verl("actor.kl_loss_coef"), KL),
    _same("verl", _verl("actor.loss_scale_factor"), MAX_COMPLETION_LENGTH),
    _same("verl", _verl("actor.grad_clip"), GRAD_NORM),
    _same("verl", _verl("actor.optim.lr"), LEARNING_RATE),
    _same("verl", _verl("actor.optim.lr_warmup_steps"), WARMUP_STEPS),
    _several("verl", "algorithm.adv_estimator", (NORMALIZATION, BASELINE), verl_estimator),
    _choice("verl", "algorithm.norm_adv_by_std_in_grpo", {True: _STD, False: _NONE}),
    _same("verl", "data.train_batch_size", GROUPS_PER_STEP),
    _same("verl", "data.max_response_length", MAX_NEW_TOKENS),
    _same("verl", "data.train_files", "data.files"),
    _same("verl", "data.prompt_key", "data.prompt_column"),
    _same("verl", "trainer.total_training_steps", NUM_STEPS),
    _same("verl", "trainer.save_freq", CHECKPOINTS),
    _same("verl", "trainer.project_name", "logger.wandb_project"),
    _same("verl", "trainer.experiment_name", "run_name"),
    # Megatron-LM
    _same("Megatron-LM", "grpo_group_size", GROUP_SIZE),
    _same("Megatron-LM", "grpo_prompts_per_step", GROUPS_PER_STEP),
    _same("Megatron-LM", "grpo_clamp_eps_lower", EPSILON_LOW),
    _same("Megatron-LM", "grpo_clamp_eps_upper", EPSILON_HIGH),
    _same("Megatron-LM", "grpo_kl_beta", KL),
    _same("Megatron-LM", "rl_default_temperature", TEMPERATURE),
    _several(
        "Megatron-LM",
        "rl_importance_sampling_truncation_coef",
        (CORRECTION_MODE, CORRECTION_HIGH, DECOUPLED),
        _truncation,
        weak_targets=(DECOUPLED,),
    ),
    _same("Megatron-LM", "lr", LEARNING_RATE),
    _same("Megatron-LM", "clip_grad", GRAD_NORM),
    _same("Megatron-LM", "train_iters", NUM_STEPS),
    _same("Megatron-LM", "save_interval", CHECKPOINTS),
    # what our sizes follow from
    _computed("TRL", "generation_batch_size", GROUPS_PER_STEP, _groups_of_rollouts),
    _computed("TRL", "per_device_train_batch_size", GROUPS_PER_STEP, _groups_of_device_batches),
    _computed("TRL", "steps_per_generation", MINIBATCHES, _minibatches_of_steps),
    _computed("TRL", "gradient_accumulation_steps", MINIBATCHES, _minibatches_of_accumulation),
    _computed("verl", _verl("actor.ppo_mini_batch_size"), MINIBATCHES, _minibatches_of_prompts),
    _computed("Megatron-LM", "global_batch_size", MINIBATCHES, _minibatches_of_rollouts),
)


def alias_named(name: str) -> Alias | None:
    """The alias with this name; None if no system has it."""
    return next((alias for alias in ALIASES if name in alias.names), None)
