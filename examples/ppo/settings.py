"""Settings of the PPO job: those of GRPO, and the critic's."""

from __future__ import annotations

from dataclasses import dataclass

from examples.grpo.settings import JobSettings
from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """`gamma`, `lam`: of generalised advantage estimation. `clip_range`: how far a value may move
    in one update. `warmup_steps`: first steps that train the critic alone.
    """

    learning_rate: float
    gamma: float
    lam: float
    clip_range: float
    warmup_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoJobSettings(JobSettings):
    """conf/train_ppo.yaml. Advantages come from the critic: groups are of one rollout."""

    critic: CriticSettings

    def __post_init__(self) -> None:
        if self.algorithm.group_size != 1 or self.algorithm.loss.kind != "ppo":
            raise ConfigError(
                f"algorithm.group_size={self.algorithm.group_size} and algorithm.loss.kind="
                f"{self.algorithm.loss.kind!r} must be 1 and 'ppo' where a critic gives advantages"
            )
        if self.mode != "async":
            raise ConfigError(
                "mode='sync' is not for train_ppo; producer.max_staleness_versions=0 with "
                "mode='async' generates and trains by turns"
            )
