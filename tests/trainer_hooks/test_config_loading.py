"""load_dataclass and checked_overrides, on small dataclasses."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from rollout.config import InferenceConfig, KVCacheManagementMode
from rollout.errors import ConfigError
from trainer_hooks.train.config_loading import load_dataclass
from trainer_hooks.train.overrides import checked_overrides


@dataclass(frozen=True, kw_only=True)
class Inner:
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    mode: Literal["auto", "never"] = "auto"
    names: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outer:
    seed: int
    limit: int | None = None
    inner: Inner
    engine: InferenceConfig


def load(**changes: Any) -> Outer:
    values = {"seed": 1, "inner": {"learning_rate": 1}, "engine": {}}
    return load_dataclass(Outer, {**values, **changes})


def test_load_dataclass_converts_nested_mappings() -> None:
    config = OmegaConf.create(
        {
            "seed": 3,
            "inner": {"learning_rate": "${seed}", "betas": [0.8, 0.9]},
            "engine": {"block_size_tokens": 16, "kv_cache_management_mode": "offload"},
        }
    )
    loaded = load_dataclass(Outer, config)
    assert loaded.inner == Inner(learning_rate=3, betas=(0.8, 0.9))
    assert loaded.engine.block_size_tokens == 16
    assert loaded.engine.kv_cache_management_mode is KVCacheManagementMode.OFFLOAD
    assert loaded.limit is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sed": 1}, "unknown config key sed; did you mean seed?"),
        ({"inner": {"learning_rte": 1.0}}, "inner.learning_rte; did you mean inner.learning_rate?"),
        ({"engine": {"block_size": 16}}, "block_size (vLLM) is engine.block_size_tokens here"),
        ({"qqq": 1}, "unknown config key qqq; known: engine, inner, limit, seed"),
        ({"inner": {}}, "inner.learning_rate is missing"),
        ({"seed": "one"}, "seed='one' must be an integer"),
        ({"seed": True}, "seed=True"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"limit": "2"}, "limit='2'"),
        ({"inner": {"learning_rate": 1.0, "names": 3}}, "inner.names=3 must be a mapping"),
        ({"inner": {"learning_rate": "???"}}, "inner.learning_rate is missing"),
        ({"inner": 3}, "inner=3 must be several settings, such as inner."),
        (
            {"inner": {"learning_rate": 1.0, "mode": "alwys"}},
            "inner.mode='alwys' must be one of auto, never",
        ),
        ({"engine": {"block_size_tokens": -4}}, "block_size_tokens"),
    ],
)
def test_load_dataclass_refuses_unfit_values_by_their_full_names(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(**changes)


def test_checked_overrides_accepts_known_keys_that_no_yaml_lists() -> None:
    arguments = ["engine.enable_prefix_caching=true", "seed=1,2", "inner=small"]
    assert checked_overrides(arguments, Outer) == [
        "++engine.enable_prefix_caching=true",
        "++seed=1,2",
        "inner=small",
    ]


def test_checked_overrides_passes_flags_and_hydra_keys() -> None:
    arguments = [
        "--multirun", "--config-name", "other", "hydra.run.dir=/tmp/x", "hydra/launcher=basic",
        "+new=1", "++a.b=2", "~inner.mode", "--config-dir=/tmp",
    ]  # fmt: skip
    assert checked_overrides(arguments, Outer) == arguments


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("engine.enable_prefix_cachin=true", "did you mean engine.enable_prefix_caching"),
        ("engin.device=cpu", "unknown config key engin; did you mean engine"),
        ("enable_prefix_caching=1", "did you mean engine.enable_prefix_caching?"),
    ],
)
def test_checked_overrides_refuses_unknown_keys(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_overrides([argument], Outer)
