"""Every field of the installed TRL's GRPOConfig is used, without effect, or refused by name."""

from __future__ import annotations

import dataclasses
import logging
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from rollout import ConfigError, InvalidRequestError, SamplingParams
from tests.installed import needs
from trainer_hooks import trl_settings
from trainer_hooks.trl_settings import NO_EFFECT, REFUSED, USED, check_trainer, sampling_params_of

pytestmark = needs("trl")

# A value of each refused field that is refused.
REFUSED_VALUES = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_base_url": "http://127.0.0.1:8000",
    "vllm_server_host": "127.0.0.1",
    "vllm_server_port": 8001,
    "vllm_server_timeout": 10.0,
    "vllm_group_port": 51217,
    "vllm_model_impl": "transformers",
    "vllm_structured_outputs_regex": "[0-9]+",
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_max_model_length": 4096,
    "vllm_tensor_parallel_size": 2,
    "cache_implementation": "static",
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"block_size": 16},
    "use_transformers_paged": True,
}


@cache
def config_fields() -> dict[str, Any]:
    """Return the default of each field of GRPOConfig."""
    from trl.trainer.grpo_config import GRPOConfig

    return {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


def trainer_with(**settings: Any) -> Any:
    """Return a stand-in for a GRPOTrainer: its config, and its own copies of some settings.

    The config is not checked by TRL, which refuses or replaces some settings itself.
    """
    args = SimpleNamespace(**(config_fields() | settings))
    copied = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    own = {name: getattr(args, name) for name in (*copied, "max_completion_length")}
    return SimpleNamespace(args=args, eos_token_ids=[1, 106], **own)


def test_the_tables_have_every_field_of_grpo_config_once() -> None:
    tables = [USED, frozenset(REFUSED), *NO_EFFECT.values()]
    every = frozenset().union(*tables)
    assert sum(map(len, tables)) == len(every), "a field is in one table"
    missing = config_fields().keys() - every
    assert not missing, f"decide what these mean for an engine: {sorted(missing)}"


def test_the_defaults_of_grpo_config_are_accepted() -> None:
    check_trainer(trainer_with())
    assert sampling_params_of(trainer_with()) == SamplingParams(
        num_tokens_to_generate=512,
        stop_token_ids=[1, 106],
        return_log_probs=True,
        logprobs_mode="processed",
    )


def test_every_refused_field_of_grpo_config_is_named_with_a_remedy() -> None:
    assert set(REFUSED_VALUES) == set(REFUSED)
    for name, value in REFUSED_VALUES.items():
        assert config_fields()[name] in (*REFUSED[name].neutral, None)
        with pytest.raises(ConfigError, match=rf"GRPOConfig\({name}=.*with TRLRollouts: \w"):
            check_trainer(trainer_with(**{name: value}))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("tools", [print], r"tools=.*one turn"),
        ("environment_factories", {None: object}, r"environment_factory=.*one turn"),
        ("_is_vlm", True, "vision-language"),
    ],
)
def test_trainers_of_tools_environments_and_images_are_refused(
    attribute: str, value: Any, message: str
) -> None:
    trainer = trainer_with()
    setattr(trainer, attribute, value)
    with pytest.raises(ConfigError, match=message):
        check_trainer(trainer)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"max_completion_length": 7}, {"num_tokens_to_generate": 7}),
        ({"max_completion_length": None}, {"num_tokens_to_generate": None}),
        ({"generation_kwargs": {"temperature": 0.5, "top_k": 3}}, {"temperature": 0.5, "top_k": 3}),
        ({"generation_kwargs": {"top_k": -1, "top_p": 1.0}}, {}),
        ({"generation_kwargs": {"max_new_tokens": 9}}, {"num_tokens_to_generate": 9}),
        ({"generation_kwargs": {"max_tokens": 9}}, {"num_tokens_to_generate": 9}),
        ({"generation_kwargs": {"min_new_tokens": 2}}, {"min_tokens": 2}),
        ({"generation_kwargs": {"stop": "\n"}}, {"stop_words": ("\n",)}),
        ({"generation_kwargs": {"stop_strings": ["a", "b"]}}, {"stop_words": ("a", "b")}),
        ({"generation_kwargs": {"stop_token_ids": [7]}}, {"stop_token_ids": (1, 7, 106)}),
        (
            {"generation_kwargs": {"eos_token_id": 7}},
            {"termination_id": -1, "stop_token_ids": (7,)},
        ),
        ({"generation_kwargs": {"ignore_eos": True}}, {"ignore_eos": True, "stop_token_ids": ()}),
        ({"generation_kwargs": {"presence_penalty": 0.5}}, {"presence_penalty": 0.5}),
        ({"generation_kwargs": {"frequency_penalty": 0.5}}, {"frequency_penalty": 0.5}),
        ({"generation_kwargs": {"logit_bias": {3: -100.0}}}, {"logit_bias": ((3, -100.0),)}),
        ({"generation_kwargs": {"allowed_token_ids": [3, 4]}}, {"allowed_token_ids": (3, 4)}),
    ],
)
def test_settings_of_grpo_config_reach_the_sampling(
    settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    plain = sampling_params_of(trainer_with())
    assert sampling_params_of(trainer_with(**settings)) == dataclasses.replace(plain, **changes)


def is_followed_or_refused(name: str, value: Any) -> bool:
    """Return whether `generation_kwargs` with this setting change the sampling, or raise."""
    try:
        params = sampling_params_of(trainer_with(generation_kwargs={name: value}))
    except (ConfigError, InvalidRequestError):
        return True
    return params != sampling_params_of(trainer_with())


def test_no_setting_of_transformers_generation_config_is_ignored() -> None:
    plain = sampling_params_of(trainer_with())
    names = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for name in names:
        if name in trl_settings._GENERATION_WITHOUT_EFFECT:
            assert sampling_params_of(trainer_with(generation_kwargs={name: 2})) == plain
        else:
            # 2 and 0.5 are the default of no setting.
            assert all(is_followed_or_refused(name, value) for value in (2, 0.5)), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, r"'num_beams': 4"),
        ({"do_sample": False}, "cannot be trained"),
        ({"suppress_tokens": [3]}, "logit_bias with -100"),
        ({"seed": 3}, "the seed of the LLM"),
        ({"max_lenght": 3}, "'max_lenght': 3.*use one of temperature"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_settings_that_no_engine_follows_are_refused_by_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling_params_of(trainer_with(generation_kwargs=given))


def test_a_changed_setting_of_a_newer_trl_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @dataclasses.dataclass
    class NewerConfig:
        seed: int = 42
        sampler: str = "plain"
        other: int = 1

    trainer = trainer_with()
    trainer.args = NewerConfig(sampler="fast")
    with caplog.at_level(logging.WARNING):
        check_trainer(trainer)
    assert [record.getMessage() for record in caplog.records] == [
        "GRPOConfig has settings that TRLRollouts does not know: sampler"
    ]
