"""The names users import, and the parameters they pass."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

import pytest

import rollout
import rollout.requests
from rollout import LLM, DynamicInferenceEngine, SamplingParams

# As users rely on them; more may be added, none may go.
PINNED = """
    LLM DynamicInferenceEngine InferenceConfig SamplingParams RolloutGroup
    KVCacheManagementMode PrefixCachingEvictionPolicy PrefixCachingCoordinatorPolicy
    MambaInferenceStateConfig Status InferenceRequest VLMInferenceRequest DynamicInferenceRequest
    DynamicInferenceEventType DynamicInferenceEvent DynamicInferenceRequestRecord
    compute_block_hashes_batched serialize_tensor deserialize_tensor EngineState EngineStats
    SuspendReport ResumeReport WeightUpdateReport RolloutError ConfigError EngineStateError
    WeightUpdateError ProtocolError EventPayloadError RequestAbortedError ContextOverflowError
    RequestOverflowError TokenOverflowError BlockOverflowError TokenLimitClamped
    MaxSequenceLengthOverflowError
"""
SIGNATURES = {
    DynamicInferenceEngine.from_model: "model inference_config tokenizer weights_version",
    DynamicInferenceEngine.add_request: "self prompt_tokens sampling_params request_id priority",
    DynamicInferenceEngine.add_group: (
        "self prompt_tokens list_of_sampling_params request_ids priority"
    ),
    DynamicInferenceEngine.update_weights: "self named_tensors version in_flight",
    DynamicInferenceEngine.set_generation_epoch: "self version",
    LLM.generate: "self prompts sampling_params n progress",
    LLM.submit: "self prompts sampling_params n",
    LLM.collect: "self num_groups timeout_s",
    LLM.update_weights: "self named_tensors version in_flight",
}


@pytest.mark.parametrize("name", PINNED.split())
def test_a_pinned_name_is_public(name: str) -> None:
    assert name in rollout.__all__
    assert hasattr(rollout, name)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert rollout.__version__ == metadata.version("rollout-engine")


def test_all_lists_exactly_what_exists() -> None:
    assert len(rollout.__all__) == len(set(rollout.__all__))
    assert [name for name in rollout.__all__ if not hasattr(rollout, name)] == []


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_pinned_parameters_keep_their_names_and_order(function: object) -> None:
    pinned = SIGNATURES[function].split()
    assert list(inspect.signature(function).parameters)[: len(pinned)] == pinned


def test_sampling_params_have_the_pinned_fields_and_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 0.0,
        "min_p": 0.0,
        "num_tokens_to_generate": None,
        "num_tokens_total": None,
        "termination_id": None,
        "stop_words": None,
        "ignore_eos": False,
        "seed": None,
        "return_log_probs": False,
        "skip_prompt_log_probs": True,
        "top_n_logprobs": 0,
        "logprobs_mode": "raw",
        "add_BOS": False,
        "detokenize_stop_sequence": False,
        "return_prompt_tokens": True,
        "streaming": False,
        "streaming_interval": 1,
        "stop_token_ids": None,
        "min_tokens": 0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_ranks": False,
        "cache_salt": None,
    }


def test_every_public_class_and_function_says_what_it_is() -> None:
    undocumented = [name for name in rollout.__all__ if not inspect.getdoc(getattr(rollout, name))]
    assert undocumented == []


@pytest.mark.parametrize("package", [rollout, rollout.requests])
def test_a_stub_names_what_its_package_loads_when_asked(package: ModuleType) -> None:
    stub = ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    named = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(named) == package.__all__
    for name, home in named.items():
        assert getattr(package, name) is getattr(import_module(str(home)), name)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = package.Nothing
