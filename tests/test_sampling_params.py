"""rollout.sampling_params: ranges, immutability, the wire."""

from __future__ import annotations

import dataclasses
import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidRequestError
from rollout.sampling_params import (
    LOGPROBS_MODES,
    MIN_TEMPERATURE,
    SAMPLING_HINTS,
    SamplingParams,
)

OUT_OF_RANGE = [
    ("temperature", -0.1, "finite and at least"),
    ("temperature", 1e-39, "finite and at least"),
    ("temperature", 9e-6, "finite and at least"),
    ("temperature", math.nan, "finite and at least"),
    ("temperature", math.inf, "finite and at least"),
    ("temperature", 1e38, "at most 1e+37"),
    ("temperature", 7.7e145, "at most 1e+37"),
    ("temperature", "hot", "finite and at least"),
    ("top_k", -1, "[0, 2147483647]"),
    ("top_k", 2**31, "[0, 2147483647]"),
    ("top_k", 2**63, "[0, 2147483647]"),
    ("top_k", 1.5, "integer"),
    ("top_k", True, "integer"),
    ("top_p", -0.1, "[0, 1]"),
    ("top_p", 1.1, "[0, 1]"),
    ("top_p", math.nan, "[0, 1]"),
    ("min_p", -0.1, "[0, 1]"),
    ("min_p", 1.1, "[0, 1]"),
    ("num_tokens_to_generate", 0, "at least 1"),
    ("num_tokens_total", -3, "at least 1"),
    ("termination_id", -2, "at least -1"),
    ("top_n_logprobs", -1, "at least 0"),
    ("streaming_interval", 0, "at least 1"),
    ("seed", 2**64, "18446744073709551615"),
    ("logprobs_mode", "cooked", "['raw', 'temperature', 'processed']"),
    ("stop_words", [""], "non-empty string"),
    ("stop_words", [1], "non-empty string"),
    ("stop_words", 1, "non-empty string"),
    ("ignore_eos", None, "True or False"),
    ("return_log_probs", 1, "True or False"),
    ("skip_prompt_log_probs", "no", "True or False"),
    ("add_BOS", [], "True or False"),
    ("detokenize_stop_sequence", 0.0, "True or False"),
    ("return_prompt_tokens", {}, "True or False"),
    ("streaming", b"", "True or False"),
    ("stop_token_ids", [-1], "[0, 2147483647]"),
    ("stop_token_ids", 7, "list of ids"),
    ("allowed_token_ids", [1.5], "[0, 2147483647]"),
    ("allowed_token_ids", [], "no token would be allowed"),
    ("logit_bias", {-1: 0.0}, "[0, 2147483647]"),
    ("logit_bias", {1: math.nan}, "[-100, 100]"),
    ("logit_bias", {1: 100.5}, "[-100, 100]"),
    ("logit_bias", [(1, 0.0), (1, 2.0)], "a map from ids"),
    ("logit_bias", 3, "a map from ids"),
    ("min_tokens", -1, "[0, 2147483647]"),
    ("repetition_penalty", 0.0, "[0.01, 100]"),
    ("repetition_penalty", math.inf, "[0.01, 100]"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"),
]

params_strategy = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(MIN_TEMPERATURE, 10),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    num_tokens_to_generate=st.none() | st.integers(1, 10_000),
    termination_id=st.none() | st.integers(-1, 200_000),
    stop_words=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1)),
    seed=st.none() | st.integers(0, 2**64 - 1),
    return_log_probs=st.booleans(),
    top_n_logprobs=st.integers(0, 20),
    logprobs_mode=st.sampled_from(LOGPROBS_MODES),
    streaming=st.booleans(),
    streaming_interval=st.integers(1, 64),
    stop_token_ids=st.none() | st.lists(st.integers(0, 200_000)),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 200_000), st.floats(-100, 100)),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 200_000), min_size=1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
)


@pytest.mark.parametrize(("field", "value", "interval"), OUT_OF_RANGE)
def test_value_out_of_range_raises_naming_field_value_and_range(field, value, interval):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    for part in (field, repr(value), interval):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("top_p", 1.0),
        ("min_p", 1),
        ("top_k", 2**31 - 1),
        ("termination_id", -1),
    ],
)
def test_ends_of_the_ranges_are_legal(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_both_token_limits_contradict_each_other():
    with pytest.raises(InvalidRequestError, match="contradict"):
        SamplingParams(num_tokens_to_generate=4, num_tokens_total=8)


def test_params_cannot_be_edited_and_can_be_hashed():
    params = SamplingParams(stop_words=["END"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5
    assert hash(params) == hash(SamplingParams(stop_words="END"))


def test_more_tokens_at_least_than_at_most_is_refused():
    with pytest.raises(InvalidRequestError, match=r"min_tokens=5.*num_tokens_to_generate=4"):
        SamplingParams(min_tokens=5, num_tokens_to_generate=4)


def test_ids_and_biases_are_kept_in_order_so_that_equal_ones_have_one_hash():
    params = SamplingParams(stop_token_ids=[3, 1, 3], logit_bias={5: 1, 2: -0.5})
    assert params.stop_token_ids == (1, 3)
    assert params.logit_bias == ((2, -0.5), (5, 1.0))
    same = SamplingParams(stop_token_ids=(1, 3), logit_bias=[[5, 1.0], [2, -0.5]])
    assert hash(params) == hash(same)


def test_stop_words_do_not_follow_the_callers_list():
    words = ["a"]
    params = SamplingParams(stop_words=words)
    words.append("b")
    assert params.stop_words == ("a",)


@given(params_strategy)
def test_params_survive_msgpack(params):
    wire = msgpack.unpackb(msgpack.packb(params.serialize()))
    assert SamplingParams.deserialize(wire) == params


def test_unknown_parameter_on_the_wire_is_refused_by_name():
    with pytest.raises(InvalidRequestError, match="heat"):
        SamplingParams.deserialize({"heat": 1.0})


@pytest.mark.parametrize(
    ("keyword", "ours"), [("max_tokens", "num_tokens_to_generate"), ("stop", "stop_words")]
)
def test_a_keyword_of_another_engine_is_refused_with_ours(keyword: str, ours: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{keyword}=5 is unknown; .* is {ours} here"):
        SamplingParams(**{keyword: 5})  # type: ignore[arg-type]


def test_every_hint_is_for_a_keyword_that_does_not_exist() -> None:
    assert not set(SAMPLING_HINTS) & {field.name for field in dataclasses.fields(SamplingParams)}


def test_so_many_stop_token_ids_are_refused_that_each_token_would_take_long():
    assert len(SamplingParams(stop_token_ids=list(range(1024))).stop_token_ids) == 1024
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids=.* at most 1024"):
        SamplingParams(stop_token_ids=list(range(1025)))
