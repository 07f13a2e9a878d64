"""Choosing a loss through conf/: each kind with all that belongs to it, contradictions refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from torch.testing import assert_close

pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from examples.grpo.settings import AlgorithmSettings, JobSettings
from examples.ppo.settings import PpoJobSettings
from rollout import ConfigError
from tests.trainer_hooks.loss_batches import random_batch
from tests.trainer_hooks.trl_losses import MAX_LENGTH, our_loss, trl_loss
from trainer_hooks.config_loading import load_dataclass
from trainer_hooks.hydra_job import checked_overrides, overridden_keys

# aggregation, clip range, divisor of token sums (max_new_tokens is 10), advantages
GROUPS: dict[str, tuple[Any, ...]] = {
    "grpo": ("seq-mean-token-mean", 0.2, 0.2, None, "std", "mean"),
    "dapo": ("token-mean", 0.2, 0.28, None, "std", "mean"),
    "dr_grpo": ("seq-mean-token-sum", 0.2, 0.2, 10, "none", "mean"),
    "gspo": ("seq-mean-token-mean", 3e-4, 4e-4, None, "std", "mean"),
    "cispo": ("token-mean", 1.0, 4.0, None, "std", "mean"),  # no floor, a cap of 5
    "rloo": ("seq-mean-token-mean", 0.2, 0.2, None, "none", "leave_one_out"),
    "ppo": ("token-mean", 0.2, 0.2, None, "none", "mean"),
}


def algorithm_of(
    *arguments: str,
    yaml: Mapping[str, Any] | None = None,
    job: str = "train_grpo",
    kind: type[JobSettings] = JobSettings,
) -> AlgorithmSettings:
    """The algorithm of an example with `arguments` on its command line.

    `yaml`: what the job's own YAML says below its groups.
    """
    overrides = checked_overrides(arguments, kind)
    GlobalHydra.instance().clear()
    with initialize_config_module(config_module="conf", version_base="1.3"):
        config = compose(job, overrides)
    values = OmegaConf.unsafe_merge(OmegaConf.to_container(config), yaml or {})
    return load_dataclass(kind, values, overridden=overridden_keys(overrides)).algorithm


def group_of(algorithm: AlgorithmSettings) -> tuple[Any, ...]:
    loss = algorithm.loss
    assert loss.dual_clip is None
    return (
        loss.aggregation,
        loss.epsilon_low,
        loss.epsilon_high,
        loss.max_completion_length,
        algorithm.advantage_normalization,
        algorithm.advantage_baseline,
    )


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        *((f"algorithm={kind}", kind) for kind in GROUPS),
        *((f"algorithm.loss.kind={kind}", kind) for kind in ("grpo", "dr_grpo", "cispo", "gspo")),
        *((f"loss_type={kind}", kind) for kind in ("grpo", "dapo", "dr_grpo", "cispo")),
        ("loss_type=grpo importance_sampling_level=sequence", "gspo"),
        ("actor.policy_loss.loss_mode=gspo", "gspo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "cispo"),
        ("actor.loss_agg_mode=seq-mean-token-mean", "grpo"),
        ("actor.loss_agg_mode=seq-mean-token-sum-norm", "dr_grpo"),
        (
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false "
            "actor.loss_agg_mode=seq-mean-token-sum-norm",
            "dr_grpo",
        ),
    ],
)
def test_a_kind_brings_all_that_belongs_to_it(argument: str, kind: str) -> None:
    algorithm = algorithm_of(*argument.split())
    assert algorithm.loss.kind == kind
    assert group_of(algorithm) == GROUPS[kind]


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo", "dr_grpo", "rloo"])
def test_a_kind_that_yaml_names_over_the_demo_brings_its_advantages(kind: str) -> None:
    algorithm = algorithm_of(yaml={"algorithm": {"loss": {"kind": kind}}})
    advantages = (algorithm.advantage_normalization, algorithm.advantage_baseline)
    assert advantages == GROUPS[kind][4:]


def test_advantages_that_yaml_gives_beside_its_kind_are_kept() -> None:
    given = {"advantage_normalization": "none", "loss": {"kind": "grpo"}}
    assert algorithm_of(yaml={"algorithm": given}).advantage_normalization == "none"


@pytest.mark.parametrize("named", ["loss_type=dapo", "algorithm.loss.kind=dapo"])
def test_a_kind_named_beside_the_demo_is_the_papers(named: str) -> None:
    assert group_of(algorithm_of("algorithm=demo", named)) == GROUPS["dapo"]


def test_trls_loss_type_in_yaml_over_another_group_says_which_group_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"kind=dapo name one setting.*group: algorithm=grpo"):
        algorithm_of(yaml={"loss_type": "grpo"})


def test_ppo_bounds_the_loss_of_bad_tokens_unless_it_is_told_not_to() -> None:
    job: Any = {"job": "train_ppo", "kind": PpoJobSettings}
    assert algorithm_of(**job).loss.dual_clip == 3.0
    assert algorithm_of("algorithm.loss.dual_clip=null", **job).loss.dual_clip is None
    assert algorithm_of("delta=5.0", **job).loss.dual_clip == 5.0


@pytest.mark.parametrize("kind", ["gspo", "cispo", "rloo"])
def test_a_ppo_job_with_another_kind_says_that_it_must_be_ppo(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.loss.kind='{kind}' must be 1 and 'ppo'"):
        algorithm_of(f"algorithm={kind}", job="train_ppo", kind=PpoJobSettings)


def test_the_demo_is_dapos_loss_without_the_deviation_of_rewards() -> None:
    algorithm = algorithm_of()
    assert algorithm.loss.kind == "dapo"
    assert group_of(algorithm) == (*GROUPS["dapo"][:4], "none", "mean")


@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ("loss_type=grpo epsilon=0.1", {1: 0.1, 2: 0.1}),
        ("epsilon_high=0.3 loss_type=grpo scale_rewards=none", {2: 0.3, 4: "none"}),
        ("loss_type=grpo algorithm.loss.epsilon_low=0.3", {1: 0.3}),
        ("algorithm.advantage_normalization=none algorithm.loss.kind=grpo", {4: "none"}),
        ("algorithm=grpo actor.clip_ratio_high=0.28", {2: 0.28}),
    ],
)
def test_what_is_given_beside_the_kind_is_kept(arguments: str, change: dict[int, Any]) -> None:
    expected = [change.get(place, value) for place, value in enumerate(GROUPS["grpo"])]
    assert list(group_of(algorithm_of(*arguments.split()))) == expected


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("loss_type=grpo", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
        ("loss_type=dr_grpo", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
        ("loss_type=dapo epsilon=0.3", {"epsilon_low": 0.3, "epsilon_high": 0.3}),
        ("loss_type=cispo epsilon_high=1.5", {"epsilon_low": 0.2, "epsilon_high": 1.5}),
        (
            "loss_type=grpo importance_sampling_level=sequence epsilon=0.01 epsilon_high=0.02",
            {"epsilon_low": 0.01, "epsilon_high": 0.02, "importance_sampling_level": "sequence"},
        ),
    ],
)
def test_the_loss_that_trls_keys_choose_is_trls(arguments: str, settings: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = algorithm_of(*arguments.split(), f"max_completion_length={MAX_LENGTH}").loss
    batch = random_batch(0)
    loss, gradient_BT, _ = our_loss(batch, config)
    loss_type = arguments.split()[0].removeprefix("loss_type=")
    inputs = {"old_per_token_logps": batch.behaviour_BT}
    expected, expected_gradient_BT, _ = trl_loss(
        GRPOTrainer, batch, inputs, loss_type=loss_type, **settings
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
            "loss_type=dr_grpo scale_rewards=group",
            "kind='dr_grpo' with advantage_normalization='std'.*'none'.*kind='grpo'",
        ),
        (
            "algorithm=rloo algorithm.advantage_baseline=mean",
            "kind='rloo' with advantage_baseline='mean'.*'leave_one_out'",
        ),
        (
            "actor.policy_loss.loss_mode=cispo actor.clip_ratio=0.2",
            "epsilon_low=0.2 with kind='cispo'.*leave it out",
        ),
        ("loss_type=cispo epsilon=0.2", "epsilon=0.2.*no lower bound.*leave epsilon out"),
        ("loss_type=cispo epsilon_high=0.28", "epsilon_high=0.28.*cap.*above 1"),
        (
            "actor.policy_loss.loss_mode=gspo actor.loss_agg_mode=token-mean",
            "aggregation='token-mean'.*kind='gspo'.*leave it out",
        ),
        ("algorithm=dr_grpo loss_type=cispo", "loss_type=cispo.*kind=dr_grpo name one setting"),
        ("importance_sampling_level=sequence", "GSPO.*loss_type=grpo"),
        ("loss_type=dapo importance_sampling_level=sequence", "GSPO.*loss_type=grpo"),
        (
            "algorithm.loss.correction.mode=truncate",
            "correction.mode='truncate' with decoupled=False.*decoupled=true",
        ),
        ("algorithm.lr=1e-4", "unknown config key algorithm.lr; .*is trainer.learning_rate"),
    ],
)
def test_what_would_compute_something_else_than_it_says_is_refused(
    arguments: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("=0.", re.escape("=0."))):
        algorithm_of(*arguments.split())


def test_megatrons_truncation_weighs_between_engine_and_start_of_the_update() -> None:
    algorithm = algorithm_of("rl_importance_sampling_truncation_coef=10.0")
    assert algorithm.decoupled
    assert (algorithm.loss.correction.mode, algorithm.loss.correction.high) == ("truncate", 10.0)
