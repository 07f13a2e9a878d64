"""JobSettings: the settings of `rollout train`, and how Hydra composes them from conf/.

Used by `trainer_hooks.train` (command, main, learner, critic, no_signal, summary, threads), by
scripts/settings_pages.py, and by programs that build on a job's settings: examples/train_trl.py,
`benchmarks.trl_step` and `benchmarks.kv_age`. `compose_settings` reads YAML files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import trainer_hooks
from rollout import ConfigError, InferenceConfig, SamplingParams
from rollout.config import MAX_THREADS, OWN_ENGINE
from rollout.ranges import (
    Choices,
    Fraction,
    Interval,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from rollout.sampling_params import TrainedTemperature
from trainer_hooks.losses.config import (
    POLICY_LOSS_KINDS,
    AdvantageBaseline,
    AdvantageNormalization,
    PolicyLossConfig,
)
from trainer_hooks.train.overrides import read_words, settings_of
from trainer_hooks.train.settings import (
    LOCAL_LAUNCHER,
    TORCHRUN_LAUNCHER,
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    FunctionSettings,
    LoggerSettings,
    ModelSettings,
    ProducerSettings,
    RewardSettings,
    Settings,
    WarmupSettings,
    WeightSyncSettings,
)
from trainer_hooks.update.settings import (
    DEFAULT_MAX_SKIPPED_STEPS,
    MaxSkippedSteps,
    ReferenceSettings,
)

# A link to conf/ in a checkout, a directory in a wheel.
CONFIG_DIRECTORY = Path(__file__).parent / "conf"
_Beta = Annotated[float, Interval(0.0, 1.0, is_high_open=True)]
_MAX_SEED = 2**32 - 1  # the largest seed of numpy's generators
# Titles of algorithms by the kind of their loss. The default is the kind in capitals. Full DAPO
# also has dynamic sampling and length penalties, and full PPO has a critic.
ALGORITHM_TITLES = {
    "dapo": "GRPO with DAPO's loss",
    "ppo": "GRPO with PPO's loss",
    "dr_grpo": "Dr. GRPO",
}
AdvantageEstimator = Literal["group", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings(Settings):
    """Settings of PPO's critic.

    learning_rate: learning rate of the critic.
    gamma: discount of later rewards in generalised advantage estimation.
    lam: lambda of generalised advantage estimation, the weight of later errors.
    clip_range: largest change of a value in one update.
    warmup_steps: number of steps at the start that train only the critic.
    """

    learning_rate: PositiveFloat
    gamma: Fraction
    lam: Fraction
    clip_range: PositiveFloat
    warmup_steps: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings(Settings):
    """Sizes of a step, the computation of advantages from rewards, and the loss.

    groups_per_step: prompts of a step.
    group_size: samples of each prompt.
    num_minibatches: optimizer steps of each pass over the batch.
    max_new_tokens: most tokens of a completion.
    loss: policy loss.
    temperature: sampling temperature of rollouts. The trainer divides its logits by it.
    shuffle_rewards: True permutes the rewards among rollouts, as a control experiment in which
        nothing can be learned.
    decoupled: True clips around the policy at the start of the step instead of the policy that
        sampled. The loss is weighted by the ratio of the two policies. Costs one more forward pass
        for batches that have a token or KV of an older version.
    advantage_normalization: divisor of the advantages. None takes the default of the kind of loss.
    advantage_baseline: value that is subtracted from the rewards of a group. None takes the default
        of the kind of loss.
    critic: PPO's critic, which computes the advantages. None compares the rollouts of a group.
    num_iterations: passes over the batch.
    max_tokens_per_forward: most tokens of a forward pass; see UpdateSettings. None sets no limit.
    is_packed: True concatenates the rollouts of a forward pass without padding; see UpdateSettings.
    share_prefixes: True computes the common beginning of rollouts once; see UpdateSettings.
    replay_routing: True trains a mixture-of-experts model with the experts that its engine used
        (docs/routing.md).
    mask_truncated_completions: True excludes rollouts that reached the length limit from training.
    advantage_estimator: advantages within a group ("group"), or REINFORCE++'s advantages, whitened
        over the batch. "reinforce_plus_plus_baseline" subtracts the group's mean first.
    reward_kl_coefficient: weight of the KL to the reference in the rewards. The weight in the loss
        is `loss.kl_coefficient`.
    reference: whether and how the reference follows the policy.
    made_for: kind of loss for which these settings are tuned. Another kind is refused.
    """

    groups_per_step: PositiveInt
    group_size: PositiveInt
    num_minibatches: PositiveInt
    max_new_tokens: PositiveInt
    loss: PolicyLossConfig
    temperature: TrainedTemperature = 1.0
    shuffle_rewards: bool = False
    decoupled: bool = False
    advantage_normalization: AdvantageNormalization | None = None
    advantage_baseline: AdvantageBaseline | None = None
    critic: CriticSettings | None = None
    num_iterations: PositiveInt = 1
    max_tokens_per_forward: PositiveInt | None = None
    is_packed: bool = False
    share_prefixes: bool = True
    replay_routing: bool = False
    mask_truncated_completions: bool = False
    advantage_estimator: AdvantageEstimator = "group"
    reward_kl_coefficient: NonNegativeFloat = 0.0
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    made_for: Annotated[str, Choices(POLICY_LOSS_KINDS)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.made_for not in (None, self.loss.kind):
            raise ConfigError(
                f"algorithm.loss.kind={self.loss.kind!r} with settings made for {self.made_for!r}; "
                f"choose algorithm={self.loss.kind}, or set algorithm.made_for=null to keep the "
                "settings"
            )
        self.loss.advantages(self.advantage_normalization, self.advantage_baseline)
        if self.loss.correction.needs_proximal and not self.decoupled:
            raise ConfigError(
                f"algorithm.loss.correction.mode={self.loss.correction.mode!r} needs the ratio of "
                "two policies, but algorithm.decoupled=False computes none; set "
                "algorithm.decoupled=true, or leave the correction out"
            )
        if self.critic is not None and (self.group_size != 1 or self.loss.kind != "ppo"):
            raise ConfigError(
                f"algorithm.group_size={self.group_size} and algorithm.loss.kind="
                f"{self.loss.kind!r} must be 1 and 'ppo' with algorithm.critic"
            )
        if self.critic is not None and self.advantage_estimator != "group":
            raise ConfigError(
                f"algorithm.advantage_estimator={self.advantage_estimator!r} with "
                "algorithm.critic, which computes advantages itself; leave one of them out"
            )
        is_of_groups = self.advantage_estimator != "reinforce_plus_plus"
        if self.critic is None and is_of_groups and self.group_size < 2:
            raise ConfigError(
                f"algorithm.group_size={self.group_size} with algorithm.advantage_estimator="
                f"{self.advantage_estimator!r}, which compares the rollouts of a group: every "
                "advantage would be 0 and nothing would be trained; set algorithm.group_size to 2 "
                "or more, or choose algorithm=ppo or algorithm=reinforce_plus_plus"
            )
        if self.reference.sync_interval is not None and not self.needs_reference:
            raise ConfigError(
                f"algorithm.reference.sync_interval={self.reference.sync_interval} without a KL "
                "term; set algorithm.loss.kl_coefficient or algorithm.reward_kl_coefficient"
            )

    @property
    def title(self) -> str:
        """Return the name of the algorithm, for people."""
        if self.critic is not None:
            return "PPO"
        if self.advantage_estimator != "group":
            return "REINFORCE++"
        return ALGORITHM_TITLES.get(self.loss.kind, self.loss.kind.upper())

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss or the rewards have a KL term."""
        return self.loss.kl_coefficient > 0.0 or self.reward_kl_coefficient > 0.0

    @property
    def update_settings(self) -> trainer_hooks.UpdateSettings:
        """Return the settings of `update_policy` and of micro-batches."""
        return trainer_hooks.UpdateSettings(
            num_iterations=self.num_iterations,
            num_minibatches=self.num_minibatches,
            max_tokens=self.max_tokens_per_forward,
            is_packed=self.is_packed,
            share_prefixes=self.share_prefixes,
            temperature=self.temperature,
            replay_routing=self.replay_routing,
        )

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of rollouts, with the log-probs that the loss needs."""
        return SamplingParams(
            temperature=self.temperature,
            num_tokens_to_generate=self.max_new_tokens,
            return_log_probs=True,
            logprobs_mode="temperature",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(Settings):
    """AdamW with linear warm-up and decay, and the intervals of checkpoints and evaluations.

    num_steps: number of training steps.
    learning_rate: highest learning rate, reached after `warmup_steps`.
    final_learning_rate_fraction: learning rate of the last step, as a fraction of the highest. The
        rate falls linearly.
    warmup_steps: steps in which the learning rate rises linearly from 0.
    betas: decay rates of AdamW's two averages.
    max_grad_norm: norm to which larger gradients are scaled down.
    checkpoint_interval: steps between two checkpoints.
    eval_interval: steps between two evaluations on held-out prompts. 0 evaluates only before and
        after training.
    num_threads: torch's threads. None takes all CPUs, or some of them if engines run at the same
        time.
    max_skipped_steps: consecutive optimizer steps skipped for non-finite gradients after which the
        job fails.
    strategy: fsdp2 divides the policy among the ranks that torchrun started. single keeps it in one
        process.
    optimizer_state_dtype: dtype of AdamW's two averages. bfloat16 halves their memory by unbiased
        rounding (BFloat16AdamW).
    gradient_checkpointing: True recomputes each layer of the policy in the backward pass. Gradients
        are the same.
    autocast: bfloat16 computes the policy's matrix products in bfloat16. Weights and gradients stay
        float32.
    scheduler: class of torch.optim.lr_scheduler that replaces the warm-up and decay. `options` are
        the class's arguments after the optimizer.
    evaluation: metrics of an evaluation.
    """

    num_steps: PositiveInt
    learning_rate: PositiveFloat
    final_learning_rate_fraction: Fraction
    warmup_steps: NonNegativeInt
    betas: tuple[_Beta, _Beta]
    max_grad_norm: PositiveFloat
    checkpoint_interval: PositiveInt
    eval_interval: NonNegativeInt
    num_threads: Annotated[int, Interval(1, MAX_THREADS)] | None
    max_skipped_steps: MaxSkippedSteps = DEFAULT_MAX_SKIPPED_STEPS
    strategy: Literal["single", "fsdp2"] = "single"
    optimizer_state_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    autocast: Literal["bfloat16"] | None = None
    scheduler: FunctionSettings | None = None
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings(Settings):
    """All settings of a job, as an entry config of conf/ lists them.

    run_name: directory of the job under outputs/train.
    num_engines: engine processes that generate beside the trainer. 0 runs one engine in the
        trainer's process.
    seed: seed of the first run.
    seeds: number of runs, one after another, with successive seeds.
    resume: auto continues from the newest checkpoint of each run. never starts over.
    engine: config of each engine.
    model: policy to train.
    data: prompts.
    reward: reward of a completion.
    warmup: supervised training before the first step.
    algorithm: sizes of a step, advantages and loss.
    trainer: optimizer, and intervals of checkpoints and evaluations.
    logger: where metrics and samples go.
    producer: order, age and filters of the rollouts.
    weight_sync: how new weights reach the engines.
    environment: environment in which the model acts.
    launcher: class that starts engine processes, and its arguments.
    weight_transport: transport of weights to engine processes, such as directory:PATH. None takes
        shared memory on this machine.
    """

    PRESETS: ClassVar[tuple[str, ...]] = ("mode",)  # groups that only set keys of other groups

    run_name: Name
    num_engines: Annotated[int, Interval(0, 1024)]
    seed: Annotated[int, Interval(0, _MAX_SEED)]
    seeds: Annotated[int, Interval(1, _MAX_SEED)]
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
    environment: EnvironmentSettings = EnvironmentSettings()  # noqa: RUF009 - it is frozen
    launcher: FunctionSettings = FunctionSettings(path=LOCAL_LAUNCHER)  # noqa: RUF009
    weight_transport: Name | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if not self.reward.terms and self.environment.path is None:
            raise ConfigError(
                "no reward is given; name a function, reward=package.module:function, set "
                "reward.terms.<name>.path, or choose an environment that gives it"
            )
        if self.model.lora is not None and self.algorithm.critic is not None:
            raise ConfigError(
                "model.lora with algorithm.critic, whose trunk would be trained as a whole model; "
                "choose an algorithm without a critic, or leave model.lora out"
            )
        if self.model.lora is not None and self.algorithm.reference.sync_interval is not None:
            raise ConfigError(
                f"algorithm.reference.sync_interval={self.algorithm.reference.sync_interval} with "
                "model.lora, whose reference is the policy without its adapter and cannot follow; "
                "leave one of them out"
            )
        if not self.num_engines and self.weight_transport is not None:
            raise ConfigError(
                f"weight_transport={self.weight_transport} with num_engines=0: there is no engine "
                "process to send weights to; set num_engines, or leave weight_transport out"
            )
        if self.trainer.strategy == "fsdp2":
            self._check_sharded()
        if not self.num_engines and self.launcher.path != LOCAL_LAUNCHER:
            raise ConfigError(
                f"launcher.path={self.launcher.path} with num_engines=0: there is nothing to "
                "start; set num_engines, or leave launcher out"
            )

    def _check_sharded(self) -> None:
        refused = {
            "model.lora": self.model.lora is not None,
            "algorithm.critic": self.algorithm.critic is not None,
            "algorithm.reference.sync_interval": self.algorithm.reference.sync_interval is not None,
            "algorithm.replay_routing=true": self.algorithm.replay_routing,
        }
        for name, is_set in refused.items():
            if is_set:
                raise ConfigError(
                    f"{name} is not supported with trainer.strategy=fsdp2; leave it out, or choose "
                    "trainer.strategy=single"
                )
        if self.launcher.path == TORCHRUN_LAUNCHER:
            raise ConfigError(
                "launcher=torchrun with trainer.strategy=fsdp2, which makes all ranks of torchrun "
                "trainers and none an engine; choose launcher=local, slurm or ray"
            )

    @property
    def pushes_at_start(self) -> bool:
        """Return whether engines start from base weights and receive the policy by a push."""
        # An engine of another package starts from a directory.
        is_other_engine = self.engine.engine != OWN_ENGINE
        return self.model.lora is not None or self.trainer.strategy == "fsdp2" or is_other_engine

    @property
    def merges_adapter(self) -> bool:
        """Return whether a push has the whole weights with the adapter merged, not the adapter
        alone."""
        # An engine in this process then needs no copy of the base weights. Engine processes merge
        # the adapter themselves, because it is small to send.
        return self.model.lora is not None and not self.num_engines

    @property
    def discards_weights(self) -> bool:
        """Return whether engines keep no copy of the weights whose memory they release."""
        # A push of an adapter alone does not bring the base weights back.
        is_whole = self.model.lora is None or self.merges_adapter
        return "weights" in self.weight_sync.release and is_whole

    @property
    def title(self) -> str:
        """Return the job's algorithm and data, for tables and plots."""
        return f"{self.algorithm.title}, {self.data.shown_title}"


def compose_settings(
    overrides: Sequence[str] = (), config_name: str = "train", config_directory: Path | None = None
) -> JobSettings:
    """Compose the settings of `rollout train --config-name CONFIG_NAME OVERRIDES`.

        settings = compose_settings(["trainer.num_steps=3"], "demo")

    `config_directory` is a directory of your own configs, whose defaults can name configs of conf/.
    Raises ConfigError for a key or a value that JobSettings does not accept.
    """
    own = [] if config_directory is None else ["--config-dir", str(config_directory)]
    words = read_words([*own, *overrides], JobSettings, config_name)
    settings = settings_of(words, JobSettings, CONFIG_DIRECTORY)
    assert settings is not None, "no multirun"
    return settings
