"""Keys of TRL, verl and Megatron-LM are refused with the name of our setting."""

import inspect
import re
from typing import Any

import pytest

pytest.importorskip("transformers")

from rollout.errors import ConfigError
from rollout.keyword_hints import field_types
from tests.installed import needs
from trainer_hooks.train import config_loading
from trainer_hooks.train.config_loading import dataclass_of, load_dataclass
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.overrides import checked_overrides
from trainer_hooks.train.settings import ProducerSettings

pytestmark = needs("reasoning_gym")


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("num_generations=4", "num_generations (TRL) is algorithm.group_size here"),
        ("algorithm.num_generations=4", "num_generations (TRL) is algorithm.group_size here"),
        ("beta=0.04", "beta (TRL) is algorithm.loss.kl_coefficient here"),
        ("epsilon_high=5", "is algorithm.loss.epsilon_high (for cispo the cap less 1) here"),
        ("rollout.n=4", "rollout.n (verl) is algorithm.group_size here"),
        ("actor_rollout_ref.rollout.n=4", "rollout.n (verl) is algorithm.group_size here"),
        ("actor.optim.lr=0.001", "actor.optim.lr (verl) is trainer.learning_rate here"),
        ("algorithm.adv_estimator=rloo", "algorithm.adv_estimator (verl) is algorithm.advantage"),
        ("trainer.total_training_steps=3", "(verl) is trainer.num_steps here"),
        ("data.filter_overlong_prompts=true", "(verl) is data.on_bad_row=skip here"),
        ("grpo_group_size=4", "grpo_group_size (Megatron-LM) is algorithm.group_size here"),
        ("train_iters=9", "train_iters (Megatron-LM) is trainer.num_steps here"),
    ],
)
def test_key_of_another_system_is_refused_with_our_name(argument: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        checked_overrides([argument], JobSettings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_staleness": 1}, "max_staleness (TRL) is producer.max_staleness_versions"),
        ({"actor_rollout_ref": {"rollout": {"n": 4}}}, "rollout.n (verl) is algorithm.group_size"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "loss_type (TRL) is the kind of loss"),
    ],
)
def test_yaml_key_of_another_system_is_refused_with_our_name(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_dataclass(ProducerSettings, values)


def test_unknown_key_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.group_siz; did you mean algorithm\.group_s"):
        checked_overrides(["algorithm.group_siz=3"], JobSettings)


def all_keys(kind: Any, path: str = "") -> set[str]:
    keys = set()
    for name, inner in field_types(kind).items():
        part = dataclass_of(inner)
        keys |= {path + name} if part is None else all_keys(part, f"{path}{name}.")
    return keys


def test_hints_name_settings_that_exist() -> None:
    known = all_keys(JobSettings)
    parts = "algorithm|trainer|producer|logger"
    named = set(re.findall(rf'\b(?:{parts})\.[a-z_.]+(?=[" ,(=])', source_of_targets()))
    assert named
    assert sorted(named - known) == []


def source_of_targets() -> str:
    """Return the right-hand sides of the hint tables."""
    source = inspect.getsource(config_loading)
    tables = source[source.index("_GROUP_SIZE = ") : source.index("def hint_for")]
    return re.sub(r'^ +"[\w.]+": ', "", tables, flags=re.MULTILINE)
