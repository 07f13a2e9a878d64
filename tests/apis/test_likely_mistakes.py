"""Likely mistakes get one clear error of the project, and numbers of numpy are accepted."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from rollout import (
    LLM,
    ConfigError,
    DynamicInferenceRequestRecord,
    EngineStateError,
    InferenceConfig,
    InvalidRequestError,
    SamplingParams,
    WeightUpdateError,
)
from rollout.apis.arguments import as_groups
from rollout.errors import ProtocolError
from rollout.weights.update import by_name
from tests.tiny_models import tiny_engine, tiny_model


@pytest.mark.parametrize("n", ["2", None, 1.5, True, 0])
def test_n_is_a_positive_integer(n: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"n={n!r} must be an integer of at least 1"):
        as_groups([[1]], None, n)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], 3, "greedy"])
def test_sampling_params_of_a_dictionary_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        as_groups([[1]], params, 1)


def test_inference_config_of_a_dictionary_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be an InferenceConfig"):
        LLM("nowhere", inference_config={"seed": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source", [lambda: torch.nn.Linear(3, 2).parameters(), lambda: None, lambda: {1: torch.ones(1)}]
)
def test_update_weights_without_names_is_refused_with_the_remedy(source: Any) -> None:
    with pytest.raises(WeightUpdateError, match="named_parameters"):
        by_name(source())


def test_sampling_params_convert_numbers_of_numpy() -> None:
    params = SamplingParams(temperature=np.float32(0.5), seed=np.int64(1), top_k=np.int32(3))
    assert params == SamplingParams(temperature=0.5, seed=1, top_k=3)
    assert SamplingParams.deserialize(msgpack.unpackb(msgpack.packb(params.serialize()))) == params


def test_device_of_torch_becomes_its_name() -> None:
    assert InferenceConfig(device=torch.device("cuda:1")).device == "cuda:1"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device=1 "):
        InferenceConfig(device=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("junk", [None, b"junk"])
def test_add_record_refuses_what_is_no_record(junk: Any) -> None:
    with pytest.raises(ProtocolError, match="not an encoded record"):
        DynamicInferenceRequestRecord.deserialize(junk)


def test_an_empty_record_has_nothing_to_merge() -> None:
    with pytest.raises(EngineStateError, match="empty record"):
        DynamicInferenceRequestRecord([]).merge()


def test_fleet_refuses_integers_that_it_cannot_send() -> None:
    engine, params = tiny_engine(tiny_model()), SamplingParams(num_tokens_to_generate=1)
    for wrong in ({"priority": 2**70}, {"request_id": 2**70}, {"priority": -(2**63) - 1}):
        with pytest.raises(InvalidRequestError, match="must be"):
            engine.add_request([1], params, **wrong)
    for name in ("num_tokens_to_generate", "num_tokens_total", "top_n_logprobs"):
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: 2**70})
    assert not engine.has_unfinished_requests()
