"""What belongs to a kind of policy loss, and which kind the keys of TRL and verl choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.losses.config import KINDS

# Reads our setting behind a target, or, by its name, another alias that was given (None if not).
Read = Callable[[str], Any]

NORMALIZATION = "algorithm.advantage_normalization"
BASELINE = "algorithm.advantage_baseline"
LOSS_KIND = "algorithm.loss.kind"
AGGREGATION = "algorithm.loss.aggregation"
EPSILON_LOW = "algorithm.loss.epsilon_low"
EPSILON_HIGH = "algorithm.loss.epsilon_high"
DUAL_CLIP = "algorithm.loss.dual_clip"
MAX_COMPLETION_LENGTH = "algorithm.loss.max_completion_length"


def loss_kind_settings(kind: str, max_new_tokens: int | None) -> dict[str, Any]:
    """All that belongs to a kind of policy loss, by our whole keys."""
    chosen = KINDS[kind]
    return {
        AGGREGATION: chosen.aggregation,
        EPSILON_LOW: chosen.epsilon_low,
        EPSILON_HIGH: chosen.epsilon_high,
        DUAL_CLIP: None,
        MAX_COMPLETION_LENGTH: max_new_tokens if chosen.divides_by_max_length else None,
        NORMALIZATION: chosen.advantage_normalization,
        BASELINE: chosen.advantage_baseline,
    }


def caps_weight(read: Read) -> bool:
    """Whether the kind's clip is a cap on a weight, as cispo's."""
    kind = KINDS.get(read(LOSS_KIND))
    return kind is not None and kind.clips_weight


def trl_epsilon_high(value: float, read: Read) -> float:
    """TRL clips at 1 + epsilon_high, but cispo's weight at epsilon_high itself."""
    if not caps_weight(read):
        return value
    if not value > 1.0:
        raise ConfigError(
            "with kind='cispo' it is the cap on the importance weight and must be above 1; TRL "
            "recommends 5"
        )
    return value - 1.0


def trl_kind(value: str, read: Read) -> Mapping[str, Any]:
    """TRL's loss_type; grpo is GSPO where its ratio is that of a whole rollout."""
    known = ("grpo", "dapo", "dr_grpo", "cispo")
    if value not in known:
        raise ConfigError(f"{value!r} has no counterpart here; those with one: {', '.join(known)}")
    is_by_rollout = read("importance_sampling_level") == "sequence"
    return {LOSS_KIND: "gspo" if is_by_rollout and value == "grpo" else value}


def trl_ratio_level(value: str, read: Read) -> Mapping[str, Any]:
    """TRL's importance_sampling_level, which makes GSPO of its grpo."""
    if value == "token":
        return {}
    if value != "sequence" or read("loss_type") != "grpo":
        raise ConfigError("one ratio per rollout is GSPO: 'sequence' with loss_type=grpo")
    return {LOSS_KIND: "gspo"}


def verl_loss_mode(value: str, read: Read) -> Mapping[str, Any]:
    """verl's policy_loss.loss_mode; `vanilla` is PPO's clipped loss, however it is aggregated."""
    if value in ("gspo", "cispo"):
        return {LOSS_KIND: value}
    if value != "vanilla":
        raise ConfigError(
            f"{value!r} has no counterpart here; those with one: vanilla, gspo, cispo"
        )
    kind = KINDS.get(read(LOSS_KIND))
    return {} if kind is None or kind.clips_tokens else {LOSS_KIND: "ppo"}


def verl_aggregation(value: str, read: Read) -> Mapping[str, Any]:
    """verl's loss_agg_mode. PPO's clipped loss is named by it; another kind keeps its name."""
    names = {"token-mean": "ppo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "dr_grpo"}
    aggregation = value.removesuffix("-norm")
    kind = KINDS.get(read(LOSS_KIND))
    settings: dict[str, Any] = {AGGREGATION: aggregation}
    if kind is not None and kind.clips_tokens and kind.aggregation != aggregation in names:
        settings[LOSS_KIND] = names[aggregation]
    if value == "seq-mean-token-sum":  # without -norm nothing else divides
        settings[MAX_COMPLETION_LENGTH] = None
    return settings


def verl_estimator(value: str, read: Read) -> Mapping[str, Any]:
    """verl's adv_estimator, which has a key of its own for the deviation of grpo."""
    if value == "grpo":
        settings = {NORMALIZATION: "std", BASELINE: "mean"}
        if read("algorithm.norm_adv_by_std_in_grpo") is not None:
            del settings[NORMALIZATION]
        return settings
    if value == "rloo":
        return {NORMALIZATION: "none", BASELINE: "leave_one_out"}
    raise ConfigError(f"{value!r} has no counterpart here; those with one: grpo, rloo")
