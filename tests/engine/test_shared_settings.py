"""shared_settings compares every field of a config or model that is not listed here."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollout import InferenceConfig
from rollout.engine.shared_settings import (
    OWN_MODEL_FIELDS,
    SHARED_CONFIG_FIELDS,
    shared_settings,
)
from rollout.layers.latent_attention import LatentDims
from rollout.models.checkpoints.loading import spec_of
from rollout.models.spec import ModelSpec
from tests.family_cases import FAMILY_CASES, family_model
from tests.tiny_models import tiny_engine, tiny_model

# Fields of InferenceConfig that are not compared: memory, speed, devices and reports.
OWN_CONFIG_FIELDS = (
    "max_sequence_length",  # compared as the engine has it: the model or the pool may allow less
    "dtype",  # compared as the model's
    *("block_size_tokens", "buffer_size_gb", "paused_buffer_size_gb", "static_kv_memory_pointers"),
    *("memory_kind", "unified_memory_level", "max_requests", "schedule_conservativeness"),
    "max_tokens",  # compared where it bounds prompts, which are not cut into chunks then
    "seed",  # clients name seeds
    *("enable_prefix_caching", "prefix_caching_eviction_policy"),
    "prefix_caching_coordinator_policy",  # the coordinator's
    *("device", "num_threads", "num_cuda_graphs"),
    *("cuda_graph_mixed_prefill_count", "use_cuda_graphs_for_non_decode_steps"),
    *("use_flashinfer_fused_rope", "tensor_parallel_size", "tensor_parallel_timeout_s"),
    *("tensor_parallel_start_timeout_s", "pg_collection"),
    *("mamba_memory_ratio", "mamba_inference_state_config"),
    "reject_non_finite_weights",  # an update that one engine refuses is taken by none
    *("metrics_writer", "logging_step_interval", "request_metadata_types"),
    "engine_options",  # of another engine, which names those that it shares
)
DIMS = LatentDims(
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
)


@cache
def spec() -> ModelSpec:
    plain = tiny_engine(tiny_model()).build.model.spec
    return changed(plain, "latent", DIMS)


def changed(of: Any, name: str, value: Any) -> Any:
    """Return a copy with another value, legal or not."""
    other = copy(of)
    object.__setattr__(other, name, value)
    return other


def settings(spec: ModelSpec, config: InferenceConfig | None = None) -> dict[str, str]:
    config = config or InferenceConfig()
    return shared_settings(spec, config, max_sequence_length=64, end_token_ids=(3, 2))


def names_that_differ(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def test_each_field_of_a_config_is_classified_once() -> None:
    classified = [*SHARED_CONFIG_FIELDS, *OWN_CONFIG_FIELDS]
    assert sorted(classified) == sorted(field.name for field in fields(InferenceConfig))
    assert OWN_MODEL_FIELDS.keys() <= {field.name for field in fields(ModelSpec)}


@pytest.mark.parametrize("name", [field.name for field in fields(InferenceConfig)])
def test_a_config_field_is_compared_if_replies_depend_on_it(name: str) -> None:
    other = settings(spec(), changed(InferenceConfig(), name, "another"))
    expected = {name} if name in SHARED_CONFIG_FIELDS else set()
    assert names_that_differ(settings(spec()), other) == expected


@pytest.mark.parametrize("name", [field.name for field in fields(ModelSpec)])
def test_each_field_of_a_model_spec_is_compared(name: str) -> None:
    value, own = getattr(spec(), name), settings(spec())
    if is_dataclass(value) and name not in OWN_MODEL_FIELDS:
        for part in fields(value):
            other = settings(changed(spec(), name, changed(value, part.name, "another")))
            assert names_that_differ(own, other) == {f"{name}.{part.name}"}
    else:
        other = settings(changed(spec(), name, "another"))
        expected = set() if name in OWN_MODEL_FIELDS else {name}
        assert names_that_differ(own, other) == expected


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_a_module_and_the_directory_that_it_is_saved_in_have_the_same_settings(
    case: str, tmp_path: Path
) -> None:
    model = family_model(case)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    # As other writers of such files have it.
    whole = re.sub(r"\b(\d+)\.0\b", r"\1", path.read_text())
    path.write_text(whole)
    assert settings(spec_of(tmp_path)) == settings(spec_of(model))


def test_max_tokens_is_compared_where_it_bounds_prompts() -> None:
    for is_chunked, expected in ((True, set()), (False, {"max_tokens"})):
        pair = [
            settings(spec(), InferenceConfig(max_tokens=n, enable_chunked_prefill=is_chunked))
            for n in (64, 128)
        ]
        assert names_that_differ(*pair) == expected


def test_shared_settings_have_the_values_that_the_engine_applies() -> None:
    engine = tiny_engine(tiny_model(), max_sequence_length=48)
    assert engine.shared_settings["max_sequence_length"] == "48"
    many = settings(changed(spec(), "windows", (4096, None) * 500))
    late = settings(changed(spec(), "windows", (*(4096, None) * 499, 4096, 4096)))
    assert names_that_differ(many, late) == {"windows"}
    assert max(map(len, many.values())) <= 1024
    other = shared_settings(
        spec(), InferenceConfig(), max_sequence_length=64, end_token_ids=(2, 3, 7)
    )
    assert names_that_differ(settings(spec()), other) == {"end_token_ids"}
