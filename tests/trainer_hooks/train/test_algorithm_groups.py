"""Losses chosen through conf/: each kind with all its defaults; contradictions are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from torch.testing import assert_close

pytest.importorskip("transformers")

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from rollout import ConfigError
from tests.installed import needs
from tests.trainer_hooks.loss_batches import random_batch
from tests.trainer_hooks.trl_losses import MAX_LENGTH, our_loss, trl_loss
from trainer_hooks.train.config_loading import load_dataclass
from trainer_hooks.train.job import CONFIG_DIRECTORY, AlgorithmSettings, JobSettings
from trainer_hooks.train.overrides import checked_overrides

pytestmark = needs("reasoning_gym")

# aggregation, clip range, divisor of token sums (max_new_tokens is 10), advantages
GROUPS: dict[str, tuple[Any, ...]] = {
    "grpo": ("seq-mean-token-mean", 0.2, 0.2, None, "std", "mean"),
    "dapo": ("token-mean", 0.2, 0.28, None, "std", "mean"),
    "dr_grpo": ("seq-mean-token-sum", 0.2, 0.2, 10, "none", "mean"),
    "gspo": ("seq-mean-token-mean", 3e-4, 4e-4, None, "std", "mean"),
    "cispo": ("token-mean", 1.0, 4.0, None, "std", "mean"),  # no floor, a cap of 5
    "sapo": ("seq-mean-token-mean", 1.0, math.inf, None, "std", "mean"),  # no clip at all
    "rloo": ("seq-mean-token-mean", 0.2, 0.2, None, "none", "leave_one_out"),
    "ppo": ("token-mean", 0.2, 0.2, None, "none", "mean"),
}


def settings_of(*arguments: str, yaml: Mapping[str, Any] | None = None) -> JobSettings:
    """Return the settings of the demo with `arguments` on its command line.

    `yaml`: values of a YAML file of the user's own, above the groups.
    """
    overrides = checked_overrides(arguments, JobSettings)
    with initialize_config_dir(str(CONFIG_DIRECTORY.resolve()), version_base="1.3"):
        config = compose("demo", overrides)
    return load_dataclass(
        JobSettings, OmegaConf.unsafe_merge(OmegaConf.to_container(config), yaml or {})
    )


def algorithm_of(*arguments: str, yaml: Mapping[str, Any] | None = None) -> AlgorithmSettings:
    return settings_of(*arguments, yaml=yaml).algorithm


def group_of(algorithm: AlgorithmSettings) -> tuple[Any, ...]:
    loss = algorithm.loss.with_limit(algorithm.max_new_tokens)
    return (
        loss.resolved_aggregation,
        *loss.clip_range,
        loss.max_completion_length,
        *loss.advantages(algorithm.advantage_normalization, algorithm.advantage_baseline),
    )


@pytest.mark.parametrize("kind", GROUPS)
def test_algorithm_group_sets_every_default_of_its_loss_kind(kind: str) -> None:
    algorithm = algorithm_of(f"algorithm={kind}")
    assert algorithm.loss.kind == kind
    assert group_of(algorithm) == GROUPS[kind]
    assert (algorithm.loss.dual_clip is None) == (kind != "ppo")
    assert (algorithm.critic is None) == (kind != "ppo")


@pytest.mark.parametrize("kind", [kind for kind in GROUPS if kind != "ppo"])
def test_loss_kind_over_another_group_keeps_none_of_its_defaults(kind: str) -> None:
    assert group_of(algorithm_of("algorithm=grpo", f"algorithm.loss.kind={kind}")) == GROUPS[kind]
    yaml = {"algorithm": {"loss": {"kind": kind}}}
    assert group_of(algorithm_of("algorithm=rloo", yaml=yaml)) == GROUPS[kind]


def test_demo_is_dapo_without_advantage_normalization() -> None:
    algorithm = algorithm_of()
    assert algorithm.loss.kind == "dapo"
    assert group_of(algorithm) == (*GROUPS["dapo"][:4], "none", "mean")


def test_yaml_with_another_loss_kind_over_the_demo_is_refused() -> None:
    yaml = {"algorithm": {"loss": {"kind": "cispo"}}}
    with pytest.raises(ConfigError, match=r"made for 'dapo'.*algorithm=cispo"):
        algorithm_of(yaml=yaml)
    kept = algorithm_of("algorithm.made_for=null", yaml=yaml)
    assert group_of(kept) == (*GROUPS["cispo"][:4], "none", "mean")


def test_ppo_group_sets_critic_and_sizes_and_overrides_win() -> None:
    settings = settings_of("algorithm=ppo")
    assert (settings.algorithm.group_size, settings.algorithm.groups_per_step) == (1, 512)
    assert settings.algorithm.loss.dual_clip == 3.0
    assert settings.trainer.learning_rate == 2e-4
    assert settings.producer.min_valid_samples == 1
    changed = settings_of(
        "algorithm=ppo", "algorithm.loss.dual_clip=null", "trainer.learning_rate=1e-4",
        "algorithm.critic.lam=0.9", "algorithm.groups_per_step=8",
    )  # fmt: skip
    assert changed.algorithm.loss.dual_clip is None
    assert changed.trainer.learning_rate == 1e-4
    assert changed.algorithm.critic is not None
    assert changed.algorithm.critic.lam == 0.9
    assert changed.algorithm.groups_per_step == 8


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ("algorithm.loss.epsilon_low=0.1 algorithm.loss.epsilon_high=0.3", {1: 0.1, 2: 0.3}),
        ("algorithm.advantage_normalization=none", {4: "none"}),
        (
            "algorithm.loss.kind=dr_grpo algorithm.loss.max_completion_length=7",
            {**dict(enumerate(GROUPS["dr_grpo"])), 3: 7},
        ),
    ],
)
def test_loss_overrides_beside_the_kind_are_kept(arguments: str, change: dict[int, Any]) -> None:
    expected = [change.get(place, value) for place, value in enumerate(GROUPS["grpo"])]
    assert list(group_of(algorithm_of("algorithm=grpo", *arguments.split()))) == expected


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("algorithm=grpo", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
        ("algorithm=dr_grpo", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
        (
            "algorithm=dapo algorithm.loss.epsilon_low=0.3 algorithm.loss.epsilon_high=0.3",
            {"epsilon_low": 0.3, "epsilon_high": 0.3},
        ),
        (
            "algorithm=cispo algorithm.loss.epsilon_high=0.5",
            {"epsilon_low": 0.2, "epsilon_high": 1.5},  # TRL names the cap itself
        ),
        (
            "algorithm=gspo algorithm.loss.epsilon_low=0.01 algorithm.loss.epsilon_high=0.02",
            {"epsilon_low": 0.01, "epsilon_high": 0.02, "importance_sampling_level": "sequence"},
        ),
    ],
)
def test_loss_of_each_algorithm_group_equals_trl(arguments: str, settings: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    algorithm = algorithm_of(*arguments.split(), f"algorithm.max_new_tokens={MAX_LENGTH}")
    batch = random_batch(0)
    config = algorithm.loss.with_limit(algorithm.max_new_tokens)
    loss, gradient_BT, _ = our_loss(batch, config)
    kind = arguments.split()[0].removeprefix("algorithm=")
    inputs = {"old_per_token_logps": batch.behaviour_BT}
    loss_type = "grpo" if kind == "gspo" else kind
    expected, expected_gradient_BT, _ = trl_loss(
        "GRPOTrainer", batch, inputs, loss_type=loss_type, **settings
    )
    assert_close(loss, expected)
    assert_close(gradient_BT, expected_gradient_BT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "algorithm=grpo algorithm.loss.aggregation=token-mean",
            "aggregation='token-mean' with kind='grpo'.*'seq-mean-token-mean'.*kind='ppo' or 'dapo",
        ),
        (
            "algorithm=dr_grpo algorithm.advantage_normalization=std",
            "kind='dr_grpo' with advantage_normalization='std'.*'none'.*kind='grpo'",
        ),
        (
            "algorithm=rloo algorithm.advantage_baseline=mean",
            "kind='rloo' with advantage_baseline='mean'.*'leave_one_out'",
        ),
        (
            "algorithm=cispo algorithm.loss.epsilon_low=0.2",
            "epsilon_low=0.2 with kind='cispo'.*leave it out",
        ),
        (
            "algorithm=gspo algorithm.loss.aggregation=token-mean",
            "aggregation='token-mean'.*kind='gspo'.*leave it out",
        ),
        (
            "algorithm.loss.correction.mode=truncate",
            "correction.mode='truncate'.*decoupled=False.*decoupled=true",
        ),
        ("algorithm=ppo algorithm.group_size=3", "group_size=3 and.*must be 1 and 'ppo'"),
        (
            "algorithm=ppo algorithm.loss.kind=cispo algorithm.loss.dual_clip=null",
            "algorithm.loss.kind='cispo' must be 1 and 'ppo'",
        ),
        ("algorithm.loss.kind=grpo", "made for 'dapo'.*algorithm=grpo.*made_for=null"),
        ("algorithm=ppo algorithm.loss.kind=gspo", "dual_clip=3.0 with kind='gspo'"),
        ("algorithm.lr=1e-4", "unknown config key algorithm.lr; .*is trainer.learning_rate"),
        ("loss_type=grpo", r"loss_type \(TRL\) is the kind of loss.*algorithm=grpo"),
    ],
)
def test_contradicting_algorithm_settings_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("=0.", re.escape("=0."))):
        algorithm_of(*arguments.split())
