"""Settings of the GRPO job: one frozen dataclass per config group of conf/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout.config import InferenceConfig
from rollout.errors import ConfigError
from trainer_hooks.advantages import AdvantageBaseline, AdvantageNormalization
from trainer_hooks.losses import PolicyLossConfig
from trainer_hooks.settings import ProducerSettings, WeightSyncSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Shape of the policy, a Qwen3 decoder with tied embeddings, made at random."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """reasoning-gym's palindrome_generation: how many letters, and how many items are held out."""

    min_length: int
    max_length: int
    dataset_seed: int
    num_held_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSettings:
    """Supervised warm-up with AdamW, until sampled answers score `target_reward`."""

    target_reward: float
    learning_rate: float
    batch_size: int
    max_steps: int
    first_check: int  # step of the first measurement of the sampled reward
    check_interval: int  # steps between two measurements
    check_prompts: int

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.check_interval < 1:
            raise ConfigError(
                f"max_steps={self.max_steps} and check_interval={self.check_interval} of the "
                "warm-up must be 1 or more; for none set target_reward=0 and max_steps=1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """GRPO: sizes of a step, how rewards become advantages, and the loss.

    `groups_in_flight`: groups kept in the engine; the ones beyond `groups_per_step` are unfinished
    when a phase ends and go on under the next weights.
    `shuffle_rewards`: the control; rewards are dealt out at random, so nothing can be learned.
    `decoupled`: clip around the policy that the step begins with, not around the one that sampled,
    and weigh by the ratio of the two; one more forward pass where a token, or the KV that it was
    sampled on, is of another version.
    """

    groups_per_step: int
    groups_in_flight: int
    group_size: int
    num_minibatches: int
    temperature: float
    max_new_tokens: int
    advantage_normalization: AdvantageNormalization
    advantage_baseline: AdvantageBaseline
    shuffle_rewards: bool
    decoupled: bool
    loss: PolicyLossConfig

    def __post_init__(self) -> None:
        if self.groups_in_flight < self.groups_per_step:
            raise ConfigError(
                f"groups_in_flight={self.groups_in_flight} must be at least "
                f"groups_per_step={self.groups_per_step}"
            )
        self.loss.check_advantages(self.advantage_normalization, self.advantage_baseline)
        if self.loss.correction.needs_proximal and not self.decoupled:
            raise ConfigError(
                f"loss.correction.mode={self.loss.correction.mode!r} with decoupled=False, which "
                "leaves nothing to weigh by; set decoupled=true, or leave the correction out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The GRPO optimizer, AdamW with linear warm-up and decay, and how often a run is saved."""

    num_steps: int
    learning_rate: float
    final_learning_rate_fraction: float
    warmup_steps: int
    betas: tuple[float, float]
    max_grad_norm: float
    checkpoint_interval: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerSettings:
    """Where metrics go besides metrics.jsonl, and how often the engine adds rows of its own.

    `engine_step_interval`: engine steps between two such rows; 0 for none.
    """

    console: bool
    engine_step_interval: int
    wandb: Literal["off", "offline", "online"]
    wandb_project: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """The whole job: `seeds` runs with seeds `seed`, `seed` + 1, ..., one after another.

    `resume`: "auto" goes on from the newest checkpoint of each run, "never" starts over.
    `run_name`: the directory of the job under outputs/train_grpo.
    `mode`: "sync" generates and trains by turns in this process; "async" has `num_engines` engine
    processes generate all the time, by the rules of `producer` and `weight_sync`.
    """

    run_name: str
    mode: Literal["sync", "async"]
    num_engines: int
    seed: int
    seeds: int
    resume: Literal["auto", "never"]
    engine: InferenceConfig
    model: ModelSettings
    task: TaskSettings
    warmup: WarmupSettings
    algorithm: AlgorithmSettings
    trainer: TrainerSettings
    logger: LoggerSettings
    producer: ProducerSettings
    weight_sync: WeightSyncSettings
