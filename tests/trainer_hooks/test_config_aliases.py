"""Keys of TRL, verl and Megatron-LM are taken for ours, and contradictions are refused."""

import io
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from rollout.errors import ConfigError
from trainer_hooks.config_aliases import ALIASES
from trainer_hooks.config_loading import load_dataclass
from trainer_hooks.config_translation import is_alias, is_key
from trainer_hooks.hydra_job import checked_overrides, config_report, overridden_keys
from trainer_hooks.losses import PolicyLossConfig
from trainer_hooks.settings import DataSettings, ProducerSettings, WeightSyncSettings


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    groups_per_step: int = 16
    group_size: int = 8
    num_minibatches: int = 4
    temperature: float = 1.0
    max_new_tokens: int = 10
    decoupled: bool = False
    advantage_normalization: str = "std"
    advantage_baseline: str = "mean"
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    num_steps: int = 1
    learning_rate: float = 1.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    checkpoint_interval: int = 1


@dataclass(frozen=True, kw_only=True)
class Logger:
    wandb_project: str = "rollout"


@dataclass(frozen=True, kw_only=True)
class Job:
    run_name: str = "demo"
    algorithm: Algorithm = field(default_factory=Algorithm)
    trainer: Trainer = field(default_factory=Trainer)
    logger: Logger = field(default_factory=Logger)
    producer: ProducerSettings = field(default_factory=ProducerSettings)
    weight_sync: WeightSyncSettings = field(default_factory=WeightSyncSettings)


@dataclass(frozen=True, kw_only=True)
class DataJob:
    data: DataSettings


def loaded(*arguments: str, **values: Any) -> Job:
    """As run_hydra_job loads a config of `values` with `arguments` on the command line."""
    config = OmegaConf.create(values)
    overrides = checked_overrides(arguments, Job)
    for override in overrides:
        key, _, value = override.partition("=")
        parsed = OmegaConf.from_dotlist([f"v={value}"]).v
        OmegaConf.update(config, key.lstrip("+"), parsed, force_add=True)
    return load_dataclass(Job, config, overridden=overridden_keys(overrides))


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("num_generations=4", "algorithm.group_size", 4),
        ("epsilon_high=0.3", "algorithm.loss.epsilon_high", 0.3),
        ("beta=0.04", "algorithm.loss.kl_coefficient", 0.04),
        ("delta=3.0", "algorithm.loss.dual_clip", 3.0),
        ("max_completion_length=64", "algorithm.max_new_tokens", 64),
        ("loss_type=grpo", "algorithm.loss.kind", "grpo"),
        ("scale_rewards=none", "algorithm.advantage_normalization", "none"),
        ("scale_rewards=true", "algorithm.advantage_normalization", "std"),
        ("max_steps=7", "trainer.num_steps", 7),
        ("max_staleness=3", "producer.max_staleness_versions", 3),
        ("generation_batch_size=256", "algorithm.groups_per_step", 32),
        ("per_device_train_batch_size=64", "algorithm.groups_per_step", 8),
        ("steps_per_generation=2", "algorithm.num_minibatches", 2),
        ("rollout.n=4", "algorithm.group_size", 4),
        ("actor_rollout_ref.rollout.n=4", "algorithm.group_size", 4),
        ("rollout.temperature=0.7", "algorithm.temperature", 0.7),
        ("actor.clip_ratio_low=0.1", "algorithm.loss.epsilon_low", 0.1),
        ("actor_rollout_ref.actor.clip_ratio_high=0.5", "algorithm.loss.epsilon_high", 0.5),
        ("actor.loss_agg_mode=token-mean", "algorithm.loss.aggregation", "token-mean"),
        ("actor.optim.lr=0.001", "trainer.learning_rate", 0.001),
        ("actor.ppo_mini_batch_size=8", "algorithm.num_minibatches", 2),
        ("algorithm.adv_estimator=rloo", "algorithm.advantage_baseline", "leave_one_out"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.advantage_normalization", "none"),
        ("data.train_batch_size=12", "algorithm.groups_per_step", 12),
        ("trainer.experiment_name=x", "run_name", "x"),
        ("grpo_group_size=4", "algorithm.group_size", 4),
        ("grpo_clamp_eps_lower=0.1", "algorithm.loss.epsilon_low", 0.1),
        ("grpo_clamp_eps_upper=0.4", "algorithm.loss.epsilon_high", 0.4),
        ("rl_importance_sampling_truncation_coef=10.0", "algorithm.loss.correction.high", 10.0),
        ("train_iters=9", "trainer.num_steps", 9),
        ("global_batch_size=32", "algorithm.num_minibatches", 4),
        ("algorithm.num_generations=4", "algorithm.group_size", 4),
        ("+num_generations=4", "algorithm.group_size", 4),
    ],
)
def test_an_alias_on_the_command_line_sets_our_key(argument: str, key: str, value: Any) -> None:
    yaml = {"algorithm": {"group_size": 8, "groups_per_step": 16}}
    settings: Any = loaded(argument, **yaml)
    for name in key.split("."):
        settings = getattr(settings, name)
    assert settings == value


def test_every_alias_has_targets_that_a_job_can_have() -> None:
    for alias in ALIASES:
        for target in alias.targets:
            assert is_key(Job, target) or is_key(DataJob, target), (alias.names, target)
        for name in alias.names:
            assert not is_key(Algorithm, name) or name == "temperature", name


def test_no_name_stands_in_the_table_twice() -> None:
    names = [name for alias in ALIASES for name in alias.names]
    assert len(names) == len(set(names))


def test_the_data_keys_of_verl_open_our_sources() -> None:
    values = {"data": {"kind": "parquet", "train_files": ["a.parquet"], "prompt_key": "q"}}
    data = load_dataclass(DataJob, values).data
    assert (data.files, data.prompt_column) == (("a.parquet",), "q")


def test_one_clip_constant_counts_for_both_sides_unless_the_upper_is_given() -> None:
    loss = loaded("epsilon=0.1", algorithm={"loss": {"epsilon_high": 0.28}}).algorithm.loss
    assert (loss.epsilon_low, loss.epsilon_high) == (0.1, 0.1)
    for arguments in (
        ["epsilon=0.1", "epsilon_high=0.5"],
        ["epsilon_high=0.5", "epsilon=0.1"],
        ["epsilon=0.1", "algorithm.loss.epsilon_high=0.5"],
        ["actor.clip_ratio=0.1", "grpo_clamp_eps_upper=0.5"],
    ):
        loss = loaded(*arguments).algorithm.loss
        assert (loss.epsilon_low, loss.epsilon_high) == (0.1, 0.5), arguments


def test_the_sizes_of_trl_follow_from_each_other() -> None:
    algorithm = loaded(
        "per_device_train_batch_size=8",
        "steps_per_generation=16",
        "gradient_accumulation_steps=4",
        "num_generations=4",
    ).algorithm
    assert (algorithm.group_size, algorithm.groups_per_step) == (4, 32)
    assert algorithm.num_minibatches == 4
    assert loaded("gradient_accumulation_steps=4").algorithm.num_minibatches == 1


def test_aliases_in_yaml_work_at_the_top_and_in_their_part() -> None:
    notes: list[str] = []
    values = {
        "num_generations": 4,
        "actor_rollout_ref": {"rollout": {"temperature": 0.5}},
        "algorithm": {"max_completion_length": 20, "loss": {"beta": 0.1}},
    }
    algorithm = load_dataclass(Job, values, notes=notes).algorithm
    assert (algorithm.group_size, algorithm.temperature) == (4, 0.5)
    assert (algorithm.max_new_tokens, algorithm.loss.kl_coefficient) == (20, 0.1)
    assert "num_generations=4 (TRL) is algorithm.group_size=4" in notes
    assert "algorithm.loss.beta=0.1 (TRL) is algorithm.loss.kl_coefficient=0.1" in notes
    assert len(notes) == 4


def test_interpolations_follow_an_alias() -> None:
    yaml = {
        "algorithm": {
            "max_new_tokens": 10,
            "loss": {
                "kind": "dr_grpo",
                "max_completion_length": "${algorithm.max_new_tokens}",
            },
        }
    }
    algorithm = loaded("max_completion_length=30", **yaml).algorithm
    assert algorithm.max_new_tokens == algorithm.loss.max_completion_length == 30


def test_our_own_keys_win_over_aliases_of_the_same_name() -> None:
    loss = load_dataclass(PolicyLossConfig, {"epsilon_high": 0.3, "epsilon": 0.1})
    assert (loss.epsilon_low, loss.epsilon_high) == (0.1, 0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["num_generations=4", "algorithm.group_size=8"],
            "num_generations=4 (TRL) and algorithm.group_size=8 name one setting; give one of them",
        ),
        (
            ["num_generations=4", "grpo_group_size=8"],
            "grpo_group_size=8 (Megatron-LM) and num_generations=4 (TRL) name one setting",
        ),
        (["epsilon=0.1", "actor.clip_ratio_low=0.2"], "name one setting"),
        (["algorithm.adv_estimator=gae"], "'gae' has no counterpart here; those with one: grpo, "),
        (["loss_type=sapo"], "loss_type=sapo (TRL): 'sapo' has no counterpart"),
        (["generation_batch_size=30"], "30 is not a multiple of 8"),
        (["actor.ppo_mini_batch_size=5"], "16 is not a multiple of 5"),
        (["data.prompt_key=q"], "data.prompt_key=q (verl) is data.prompt_column here, which this"),
        (["+_aliases_.num_generation=3"], "num_generation is no alias"),
        (["num_generation=3"], "unknown config key num_generation"),
    ],
)
def test_what_contradicts_itself_or_has_no_counterpart_is_refused(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaded(*arguments, algorithm={"group_size": 8, "groups_per_step": 16})


def test_equal_values_under_two_names_are_no_contradiction() -> None:
    settings = loaded("num_generations=4", "grpo_group_size=4", "algorithm.group_size=4")
    assert settings.algorithm.group_size == 4


def test_an_alias_in_yaml_that_contradicts_its_key_is_refused() -> None:
    values = {"num_generations": 4, "algorithm": {"group_size": 8}}
    with pytest.raises(ConfigError, match=r"num_generations=4 \(TRL\) and algorithm.group_size=8"):
        load_dataclass(Job, values)


def test_an_epsilon_high_that_could_be_trls_cap_or_ours_is_refused() -> None:
    values = {"loss_type": "cispo", "epsilon_high": 5.0}
    with pytest.raises(ConfigError, match=r"epsilon_high=5\.0 beside loss_type=cispo.*kind=cispo"):
        load_dataclass(PolicyLossConfig, values)


def test_the_values_given_are_not_changed() -> None:
    values = {"num_generations": 4, "algorithm": {"temperature": 0.5}}
    load_dataclass(Job, values)
    assert values == {"num_generations": 4, "algorithm": {"temperature": 0.5}}


def test_what_is_no_alias_is_told_apart() -> None:
    assert is_alias(Job, "rollout.n")
    assert is_alias(Job, "algorithm.num_generations")
    assert not is_alias(Job, "algorithm.group_size")
    assert not is_alias(Job, "algorithm.rollout")
    assert not is_alias(Job, "rollout")


def test_sweeps_of_an_alias_stay_sweeps() -> None:
    assert checked_overrides(["num_generations=4,8"], Job) == ["+_aliases_.num_generations=4,8"]


def test_the_report_is_yaml_with_a_line_per_alias() -> None:
    notes: list[str] = []
    settings = load_dataclass(Job, {"num_generations": 4}, notes=notes)
    console = Console(file=io.StringIO(), width=120)
    console.print(config_report(settings, notes))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"algorithm:\s+groups_per_step: 16\s+group_size: 4", text)
    assert "config: num_generations=4 (TRL) is algorithm.group_size=4" in text
    yaml = "\n".join(line.rstrip() for line in text.splitlines() if "config:" not in line)
    assert load_dataclass(Job, OmegaConf.create(yaml)) == settings
