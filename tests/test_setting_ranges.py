"""Every field of every settings dataclass declares its range, and refuses what lies outside."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import rollout
import trainer_hooks
from rollout import ConfigError, InferenceConfig, InvalidRequestError
from rollout.cli.settings import UsageError
from rollout.config import KVCacheManagementMode, MambaInferenceStateConfig
from rollout.ranges import (
    AnyValue,
    Interval,
    Name,
    NonNegativeInt,
    PositiveInt,
    Refused,
    check_value,
    ranges_of,
)
from trainer_hooks import PolicyLossConfig, clip_gradients
from trainer_hooks.train.job import AlgorithmSettings, CriticSettings, JobSettings, TrainerSettings
from trainer_hooks.train.settings import (
    CurriculumSettings,
    DataSettings,
    EvaluationSettings,
    LoggerSettings,
    LoraSettings,
    ModelSettings,
    ProducerSettings,
    RewardSettings,
    RewardTerm,
    WarmupSettings,
    WeightSyncSettings,
)

SUFFIXES = ("Config", "Settings", "Params", "Limits", "Load", "Correction", "Bound", "RangeFilter")
# Dataclasses with such a name that nobody sets: the engine computes them.
COMPUTED = {"AdmissionLimits"}
# Settings under other names.
OTHERS = (RewardTerm, MambaInferenceStateConfig)
ERRORS = (ConfigError, InvalidRequestError, UsageError)

ALGORITHM = {
    "groups_per_step": 2,
    "group_size": 2,
    "num_minibatches": 1,
    "temperature": 1.0,
    "max_new_tokens": 4,
    "shuffle_rewards": False,
    "decoupled": False,
    "loss": PolicyLossConfig(kind="grpo"),
}
TRAINER = {
    "num_steps": 2,
    "learning_rate": 1e-3,
    "final_learning_rate_fraction": 0.1,
    "warmup_steps": 0,
    "betas": (0.9, 0.99),
    "max_grad_norm": 1.0,
    "checkpoint_interval": 1,
    "eval_interval": 0,
    "num_threads": None,
}
# What a settings dataclass is made with, where it has fields without a default.
REQUIRED: dict[str, dict[str, Any]] = {
    "AlgorithmSettings": ALGORITHM,
    "CriticSettings": dict(learning_rate=1e-3, gamma=1.0, lam=1.0, clip_range=0.2, warmup_steps=0),
    "CurriculumSettings": {"path": "os.path:join"},
    "DataSettings": {"kind": "jsonl", "path": "prompts.jsonl"},
    "FunctionSettings": {"path": "os.path:join"},
    "JobSettings": {
        "run_name": "a",
        "num_engines": 0,
        "seed": 0,
        "seeds": 1,
        "resume": "never",
        "engine": InferenceConfig(),
        "model": ModelSettings(path="model"),
        "data": DataSettings(kind="jsonl", path="prompts.jsonl"),
        "reward": RewardSettings(terms={"own": RewardTerm(path="os.path:join")}),
        "warmup": WarmupSettings(max_steps=0),
        "algorithm": AlgorithmSettings(**ALGORITHM),
        "trainer": TrainerSettings(**TRAINER),
        "logger": LoggerSettings(),
        "producer": ProducerSettings(),
        "weight_sync": WeightSyncSettings(),
    },
    "LoraSettings": {"rank": 4, "alpha": 8.0},
    "MambaInferenceStateConfig": {
        "layer_type_list": ["M"],
        "mamba_conv_states_shape": (2, 3),
        "mamba_ssm_states_shape": (2, 3),
    },
    "ModelSettings": {"path": "model"},
    "RewardTerm": {"path": "os.path:join"},
    "ServingLoad": {"url": "http://127.0.0.1:1"},
    "TrainerSettings": TRAINER,
    "WarmupSettings": {"max_steps": 0},
}
NUMBERS = (0, -1, 0.5, -0.5, math.nan, math.inf, -math.inf, 10**400, 2**70)
OTHER_VALUES = ("", "?", True, None, [], {}, object(), b"x", (1, 2, 3), [None], {"a": None}, {1: 2})
BAD_VALUES: tuple[Any, ...] = (*NUMBERS, *OTHER_VALUES)


def _module_names() -> Iterator[str]:
    """The product's modules, but programs, and kernels that need a device's compiler."""
    for package in (rollout, trainer_hooks):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and "triton" not in module.name:
                yield module.name
    yield "trainer_hooks.train.job"


@cache
def settings_dataclasses() -> list[type]:
    """Return all settings dataclasses of the product and examples, found in their modules."""
    found = {*OTHERS}
    for name in _module_names():
        try:
            members = vars(importlib.import_module(name)).values()
        except ImportError:  # of an optional package
            continue
        for kind in members:
            is_own = isinstance(kind, type) and kind.__module__ == name
            if is_own and dataclasses.is_dataclass(kind) and kind.__name__.endswith(SUFFIXES):
                found.add(kind)
    return sorted(
        (kind for kind in found if kind.__name__ not in COMPUTED), key=lambda kind: kind.__name__
    )


def fields() -> Iterator[tuple[type, str]]:
    for kind in settings_dataclasses():
        for field in dataclasses.fields(kind):
            yield kind, field.name


def test_all_settings_dataclasses_are_found() -> None:
    names = {kind.__name__ for kind in settings_dataclasses()}
    assert names >= {
        "AlgorithmSettings", "CoordinatorLimits", "CriticSettings", "CurriculumSettings",
        "DataSettings", "EnvironmentSettings", "EpisodeLimits", "EssBound", "EvaluationSettings",
        "FunctionSettings", "InferenceConfig", "JobSettings", "LoggerSettings", "LoraSettings",
        "ModelSettings", "OffPolicyCorrection", "OfflineLoad", "PolicyLossConfig",
        "ProducerSettings", "PythonLimits", "ReferenceSettings", "RewardRangeFilter",
        "RewardSettings",
        "RewardTerm", "SamplingParams", "ServeConfig", "ServingLoad", "SourceSettings",
        "TrainerSettings", "UpdateSettings", "WarmupSettings", "WeightSyncSettings",
    }  # fmt: skip


@pytest.mark.parametrize("kind", settings_dataclasses(), ids=lambda kind: kind.__name__)
def test_every_field_of_settings_declares_its_range(kind: type) -> None:
    assert set(ranges_of(kind)) == {field.name for field in dataclasses.fields(kind)}
    reference = kind(**REQUIRED.get(kind.__name__, {}))  # its defaults are within their ranges
    for name, value_range in ranges_of(kind).items():
        assert value_range.take(getattr(reference, name)) is getattr(reference, name)


@pytest.mark.parametrize("kind", settings_dataclasses(), ids=lambda kind: kind.__name__)
def test_a_value_outside_of_the_range_is_refused_with_field_value_and_range(kind: type) -> None:
    required = REQUIRED.get(kind.__name__, {})
    for name, value_range in ranges_of(kind).items():
        num_refused = 0
        for value in BAD_VALUES:
            try:
                value_range.take(value)
            except Refused:
                num_refused += 1
                with pytest.raises(ERRORS) as caught:
                    kind(**{**required, name: value})
                message = str(caught.value)
                assert message.startswith(f"{name}="), message
                assert value_range.text() in message
                assert len(message) < 2000
        is_open = isinstance(value_range, AnyValue)
        assert is_open or num_refused >= len(BAD_VALUES) // 3, (kind, name)


# The ranges themselves, by hand: values that train nothing, reverse gradients or crash later.
NAMED = [
    (TrainerSettings, TRAINER, "max_grad_norm", (0, -1.0, math.nan)),
    (TrainerSettings, TRAINER, "checkpoint_interval", (0, -1, 0.5)),
    (TrainerSettings, TRAINER, "num_steps", (0, -1)),
    (TrainerSettings, TRAINER, "betas", ((0.9, 1.0), (-0.1, 0.9), (0.9,), (math.nan, 0.9))),
    (TrainerSettings, TRAINER, "final_learning_rate_fraction", (-0.1, 1.1)),
    (TrainerSettings, TRAINER, "learning_rate", (0.0, -1e-3, math.inf)),
    (TrainerSettings, TRAINER, "num_threads", (0, 10**6)),
    (TrainerSettings, TRAINER, "eval_interval", (-1,)),
    (AlgorithmSettings, ALGORITHM, "temperature", (0.0, -1.0, 1e-9, math.inf)),
    (AlgorithmSettings, ALGORITHM, "group_size", (0, -1)),
    (AlgorithmSettings, ALGORITHM, "groups_per_step", (0,)),
    (AlgorithmSettings, ALGORITHM, "num_minibatches", (0,)),
    (AlgorithmSettings, ALGORITHM, "reward_kl_coefficient", (-1.0, math.nan)),
    (CriticSettings, REQUIRED["CriticSettings"], "gamma", (-0.1, 1.1)),
    (CriticSettings, REQUIRED["CriticSettings"], "clip_range", (0.0,)),
    (JobSettings, REQUIRED["JobSettings"], "num_engines", (-1, 10**6)),
    (JobSettings, REQUIRED["JobSettings"], "seed", (-1, 2**32)),
    (JobSettings, REQUIRED["JobSettings"], "seeds", (0, -3)),
    (JobSettings, REQUIRED["JobSettings"], "run_name", ("",)),
    (WarmupSettings, {"max_steps": 0}, "batch_size", (0,)),
    (EvaluationSettings, {}, "temperature", (-1.0, 1e-9)),
    (LoraSettings, REQUIRED["LoraSettings"], "alpha", (0.0, math.inf)),
    (CurriculumSettings, {"path": "a:b"}, "path", ("",)),
]


@pytest.mark.parametrize(
    ("kind", "required", "name", "values"), NAMED, ids=[f"{n[0].__name__}.{n[2]}" for n in NAMED]
)
def test_settings_that_train_nothing_are_refused(
    kind: type, required: dict[str, Any], name: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name}=.* must be "):
            kind(**{**required, name: value})


@pytest.mark.parametrize("estimator", ["group", "reinforce_plus_plus_baseline"])
def test_group_size_1_is_refused_where_rollouts_of_a_group_are_compared(estimator: Any) -> None:
    with pytest.raises(ConfigError, match=r"group_size=1 .* nothing would be trained"):
        AlgorithmSettings(**{**ALGORITHM, "group_size": 1, "advantage_estimator": estimator})
    AlgorithmSettings(
        **{**ALGORITHM, "group_size": 1, "advantage_estimator": "reinforce_plus_plus"}
    )


def test_clip_gradients_refuses_a_norm_that_drops_or_reverses_gradients() -> None:
    import torch

    for max_norm in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=r"max_norm=.* above 0"):
            clip_gradients(torch.nn.Linear(1, 1), max_norm)


def test_a_field_without_a_range_is_a_mistake_of_the_settings() -> None:
    @dataclasses.dataclass
    class Open:
        count: int = 1

    with pytest.raises(TypeError, match=r"Open\.count: .*int.* declares no range"):
        ranges_of(Open)


def test_values_become_those_of_the_fields_type() -> None:
    assert (
        check_value("mode", "offload", KVCacheManagementMode, ConfigError)
        is KVCacheManagementMode.OFFLOAD
    )
    assert type(check_value("n", np.int64(3), PositiveInt, ConfigError)) is int
    assert check_value("names", ["a"], tuple[Name, ...], ConfigError) == ("a",)
    assert check_value("n", None, NonNegativeInt | None, ConfigError) is None


def test_a_huge_value_is_shown_short() -> None:
    for value in (10**400, -(10**5000), "x" * 10**6):
        with pytest.raises(ConfigError) as caught:
            check_value("n", value, PositiveInt, ConfigError)
        assert len(str(caught.value)) < 400


def test_intervals_with_open_ends() -> None:
    from typing import Annotated

    inside = Annotated[float, Interval(0.0, 1.0, is_low_open=True, is_high_open=True)]
    for value in (0.0, 1.0, True, "0.5", math.nan):
        with pytest.raises(ConfigError, match=r"x=.* must be a number in \(0, 1\)"):
            check_value("x", value, inside, ConfigError)
    assert check_value("x", 0.5, inside, ConfigError) == 0.5
