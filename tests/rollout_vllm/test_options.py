"""Settings of vLLM, and what is refused, without vLLM."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import LLM, ConfigError, InferenceConfig, InvalidRequestError, SamplingParams
from rollout.errors import ModelError
from rollout.scheduling.stopping import StopRule
from rollout_vllm import installed
from rollout_vllm.engine import make_engine
from rollout_vllm.options import (
    ARGUMENTS,
    FOLLOWED,
    LOGPROBS_MODES,
    OWN_ARGUMENTS,
    REMEDIES,
    check_params,
    engine_arguments,
    sampling_arguments,
)

# A value off its default for each field that another engine than this project's may have to refuse.
OFF_DEFAULT: dict[str, Any] = {
    "kv_cache_management_mode": "offload",
    "deterministic": True,
    "static_kv_memory_pointers": True,
    "memory_kind": "reserved",
    "unified_memory_level": 1,
    "paused_buffer_size_gb": 1.0,
    "schedule_conservativeness": 0.5,
    "num_cuda_graphs": 4,
    "cuda_graph_mixed_prefill_count": 4,
    "use_cuda_graphs_for_non_decode_steps": False,
    "tensor_parallel_timeout_s": 5.0,
    "tensor_parallel_start_timeout_s": 5.0,
    "record_routing": True,
    "track_paused_request_events": True,
}


def of_vllm(**fields: Any) -> InferenceConfig:
    return InferenceConfig(engine="vllm", **fields)


@pytest.mark.parametrize("name", OFF_DEFAULT)
def test_engine_arguments_refuse_a_field_that_vllm_cannot_follow(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*engine='vllm'"):
        engine_arguments(of_vllm(**{name: OFF_DEFAULT[name]}))


def test_every_field_of_inference_config_is_followed_or_refused() -> None:
    """A new field must be put into one of the two lists."""
    hard_to_set = {
        "pg_collection",  # it has process groups
        "use_flashinfer_fused_rope",  # refused for every engine
        "prefix_caching_eviction_policy",  # needs enable_prefix_caching
    }
    names = {field.name for field in dataclasses.fields(InferenceConfig)}
    assert names == FOLLOWED | OFF_DEFAULT.keys() | hard_to_set
    assert REMEDIES.keys() <= names - FOLLOWED


def test_engine_arguments_are_named_as_vllm_names_them() -> None:
    arguments = engine_arguments(
        of_vllm(
            max_sequence_length=512,
            max_requests=8,
            max_tokens=64,
            block_size_tokens=32,
            buffer_size_gb=0.5,
            dtype="float32",
            engine_options={"gpu_memory_utilization": 0.8},
        )
    )
    assert arguments["max_model_len"] == 512
    assert arguments["max_num_seqs"] == 8
    assert arguments["max_num_batched_tokens"] == 64
    assert arguments["block_size"] == 32
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert arguments["gpu_memory_utilization"] == 0.8
    assert not {*arguments} & {*ARGUMENTS} - {*ARGUMENTS.values()}


@pytest.mark.parametrize("name", OWN_ARGUMENTS)
def test_engine_options_that_would_break_a_promise_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*cannot be set"):
        engine_arguments(of_vllm(engine_options={name: 1}))


def test_engine_options_with_workers_on_other_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"distributed_executor_backend'\]='ray'.*use 'mp'"):
        engine_arguments(of_vllm(engine_options={"distributed_executor_backend": "ray"}))
    options = engine_arguments(of_vllm(engine_options={"distributed_executor_backend": "mp"}))
    assert options["distributed_executor_backend"] == "mp"


def test_engine_options_that_repeat_a_field_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len.*max_sequence_length"):
        engine_arguments(of_vllm(max_sequence_length=64, engine_options={"max_model_len": 64}))


def test_engine_options_without_another_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine_options.*another engine"):
        InferenceConfig(engine_options={"gpu_memory_utilization": 0.8})


def test_an_unknown_engine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine='rolout' is unknown; did you mean rollout\?"):
        LLM(tmp_path, engine="rolout")


def test_require_vllm_refuses_a_missing_or_old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_version", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32\.\*: pip install"):
        installed.require_vllm()
    monkeypatch.setattr(installed, "_version", lambda name: "0.29.1" if name == "vllm" else None)
    with pytest.raises(ConfigError, match=r"vllm 0\.29\.1 is installed"):
        installed.require_vllm()
    monkeypatch.setattr(installed, "_version", lambda _: "0.32.4")
    installed.require_vllm()


def test_make_engine_of_vllm_names_the_fault_of_a_path_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_version", lambda _: "0.32.4")
    with pytest.raises(ModelError, match=r"Qwen/Qwen3-0\.6B is a name of the Hugging Face hub"):
        make_engine("Qwen/Qwen3-0.6B", InferenceConfig(engine="vllm"))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        make_engine(tmp_path, InferenceConfig(engine="vllm"))


RULE = StopRule(end_ids=(7,), stop_words=(), max_length=40)


@given(
    temperature=st.sampled_from((0.0, 0.7, 1.0)),
    top_p=st.sampled_from((0.0, 0.9, 1.0)),
    mode=st.sampled_from(("raw", "temperature", "processed")),
    engine_mode=st.sampled_from(LOGPROBS_MODES),
    bias=st.sampled_from((None, {3: 1.0})),
)
def test_logprobs_mode_is_refused_unless_vllm_reports_the_same_numbers(
    temperature: float, top_p: float, mode: str, engine_mode: str, bias: dict[int, float] | None
) -> None:
    """The numbers of two modes are equal where what lies between them does nothing."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        logprobs_mode=mode,
        logit_bias=bias,
        return_log_probs=True,
    )
    order = ("raw", "temperature", "processed")
    wanted = order.index(mode) if temperature else 0  # a greedy request has the raw ones
    reported = order.index("raw" if engine_mode == "raw_logprobs" else "processed")
    low, high = sorted((wanted, reported))
    is_cut = top_p == 0.9 or bias is not None
    scales, changes = temperature not in (0.0, 1.0) and low == 0, is_cut and high == 2
    is_same = low == high or not (scales or changes)
    if is_same:
        check_params(params, engine_mode)
    else:
        with pytest.raises(InvalidRequestError, match=f"logprobs_mode='{mode}'"):
            check_params(params, engine_mode)


def test_sampled_requests_are_refused_with_speculative_config_on_a_cpu() -> None:
    """vLLM 0.32 divides the logits of drafts by temperatures that its CPU build never writes."""
    check_params(SamplingParams(temperature=0.0), LOGPROBS_MODES[0], must_be_greedy=True)
    with pytest.raises(InvalidRequestError, match=r"temperature=0\.7.*speculative_config"):
        check_params(SamplingParams(temperature=0.7), LOGPROBS_MODES[0], must_be_greedy=True)


def test_sampling_arguments_leave_the_end_of_a_request_to_the_stop_rule() -> None:
    params = SamplingParams(num_tokens_to_generate=9, termination_id=7)
    arguments = sampling_arguments(params, 9, RULE, wants_prompt_logprobs=False)
    assert arguments["ignore_eos"]
    assert arguments["stop_token_ids"] is None
    assert arguments["max_tokens"] == 9
    assert arguments["top_p"] == 1.0
    assert arguments["seed"] is None
    forbidding = dataclasses.replace(params, min_tokens=4, seed=2**64 - 1)
    arguments = sampling_arguments(forbidding, 9, RULE, wants_prompt_logprobs=True)
    assert (arguments["min_tokens"], arguments["stop_token_ids"]) == (4, [7])
    assert 0 <= arguments["seed"] < 2**63
    assert arguments["prompt_logprobs"] == 0
