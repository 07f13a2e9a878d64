"""Settings refuse the keyword of another system and say what it is called here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from rollout import ConfigError
from trainer_hooks import OffPolicyCorrection, PolicyLossConfig, ReferenceSettings, UpdateSettings
from trainer_hooks.losses.config import LOSS_HINTS
from trainer_hooks.update.micro_batches import UPDATE_HINTS
from trainer_hooks.update.settings import REFERENCE_HINTS

TABLES: list[tuple[Any, Mapping[str, str]]] = [
    (PolicyLossConfig, LOSS_HINTS),
    (UpdateSettings, UPDATE_HINTS),
    (ReferenceSettings, REFERENCE_HINTS),
]


@pytest.mark.parametrize(
    ("kind", "keyword", "answer"),
    [
        (PolicyLossConfig, "beta", "beta=0.1 is unknown; beta is kl_coefficient here"),
        (PolicyLossConfig, "clip_range", "clip_range is epsilon_low and epsilon_high here"),
        (PolicyLossConfig, "epsilon", "epsilon is epsilon_low and epsilon_high here"),
        (PolicyLossConfig, "clip_ratio_high", "clip_ratio_high is epsilon_high here"),
        (PolicyLossConfig, "loss_type", "loss_type is kind here"),
        (PolicyLossConfig, "entropy_coeff", "entropy_coeff is entropy_coefficient here"),
        (UpdateSettings, "ppo_epochs", "ppo_epochs is num_iterations here"),
        (UpdateSettings, "grad_clip", "grad_clip is max_grad_norm here"),
        (ReferenceSettings, "ref_model_sync_steps", "is sync_interval here"),
    ],
)
def test_settings_name_ours_for_a_keyword_of_another_system(
    kind: Any, keyword: str, answer: str
) -> None:
    with pytest.raises(ConfigError, match=answer):
        kind(**{keyword: 0.1})


@pytest.mark.parametrize(("kind", "hints"), TABLES)
def test_no_hint_hides_a_field_and_each_names_something_that_exists(
    kind: Any, hints: Mapping[str, str]
) -> None:
    own = {field.name for field in fields(kind)}
    assert not own & set(hints)
    others = {"normalize", "UpdateSettings.temperature"}
    for answer in hints.values():
        words = set(answer.replace("=", " ").replace(",", "").split())
        assert words & (own | others), answer


def test_settings_with_hints_can_be_replaced_and_made_as_before() -> None:
    config = replace(PolicyLossConfig(kind="grpo", epsilon_low=0.1), kl_coefficient=0.2)
    assert (config.epsilon_low, config.correction) == (0.1, OffPolicyCorrection())
    with pytest.raises(TypeError, match="nonsense"):
        PolicyLossConfig(nonsense=1)  # type: ignore[call-arg]
