"""Settings of examples/train_grpo.py: one frozen dataclass per config group of conf/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout import ConfigError, InferenceConfig, SamplingParams
from trainer_hooks import PolicyLossConfig
from trainer_hooks.advantages import AdvantageBaseline, AdvantageNormalization
from trainer_hooks.jobs import (
    DataSettings,
    LoggerSettings,
    ModelSettings,
    ProducerSettings,
    RewardSettings,
    WarmupSettings,
    WeightSyncSettings,
)


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
class AlgorithmSettings:
    """Sizes of a step, how rewards become advantages, and the loss.

    `advantage_normalization`, `advantage_baseline`: None takes those of the kind of loss.
    `shuffle_rewards`: the control; rewards are dealt out at random, so nothing can be learned.
    `decoupled`: clip around the policy that the step begins with, not around the one that sampled,
    and weigh by the ratio of the two. It costs one more forward pass where a token, or the KV that
    it was sampled on, is of another version.
    `critic`: advantages come from a critic (PPO); None takes those of groups.
    `made_for`: the kind of loss from which these settings deviate on purpose; they are refused with
    another kind.
    """

    groups_per_step: int
    group_size: int
    num_minibatches: int
    temperature: float
    max_new_tokens: int
    shuffle_rewards: bool
    decoupled: bool
    loss: PolicyLossConfig
    advantage_normalization: AdvantageNormalization | None = None
    advantage_baseline: AdvantageBaseline | None = None
    critic: CriticSettings | None = None
    made_for: str | None = None

    def __post_init__(self) -> None:
        if self.made_for not in (None, self.loss.kind):
            raise ConfigError(
                f"algorithm.loss.kind={self.loss.kind!r} with settings that are made for "
                f"{self.made_for!r}; choose its group, algorithm={self.loss.kind}, or set "
                "algorithm.made_for=null to keep them"
            )
        self.loss.advantages(self.advantage_normalization, self.advantage_baseline)
        if self.loss.correction.needs_proximal and not self.decoupled:
            raise ConfigError(
                f"loss.correction.mode={self.loss.correction.mode!r} with decoupled=False, which "
                "leaves nothing to weigh by; set decoupled=true, or leave the correction out"
            )
        if self.critic is not None and (self.group_size != 1 or self.loss.kind != "ppo"):
            raise ConfigError(
                f"algorithm.group_size={self.group_size} and algorithm.loss.kind="
                f"{self.loss.kind!r} must be 1 and 'ppo' where a critic gives advantages"
            )

    def sampling_params(self, termination_id: int) -> SamplingParams:
        """How rollouts are sampled, with the log-probs that the loss corrects by."""
        return SamplingParams(
            temperature=self.temperature,
            num_tokens_to_generate=self.max_new_tokens,
            termination_id=termination_id,
            return_log_probs=True,
            logprobs_mode="temperature",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """AdamW with linear warm-up and decay, and how often a run is saved and evaluated.

    `eval_interval`: steps between two evaluations on held-out prompts; 0 for before and after only.
    `num_threads`: of torch; None leaves them as they are.
    """

    num_steps: int
    learning_rate: float
    final_learning_rate_fraction: float
    warmup_steps: int
    betas: tuple[float, float]
    max_grad_norm: float
    checkpoint_interval: int
    eval_interval: int
    num_threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """conf/train_grpo.yaml: `seeds` runs with seeds `seed`, `seed` + 1, ..., one after another.

    `run_name`: the directory of the job under outputs/train_grpo.
    `num_engines`: engine processes that generate beside the trainer; 0 for one engine in this
    process. `resume`: "auto" goes on from the newest checkpoint of each run, "never" starts over.
    """

    run_name: str
    num_engines: int
    seed: int
    seeds: int
    resume: Literal["auto", "never"]
    engine: InferenceConfig
    model: ModelSettings
    data: DataSettings
    reward: RewardSettings
    warmup: WarmupSettings
    algorithm: AlgorithmSettings
    trainer: TrainerSettings
    logger: LoggerSettings
    producer: ProducerSettings
    weight_sync: WeightSyncSettings

    @property
    def title(self) -> str:
        """What is trained, for people."""
        kind = "PPO" if self.algorithm.critic else self.algorithm.loss.kind.upper()
        return f"{kind}, {self.data.shown_title}"
