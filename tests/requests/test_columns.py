"""Values per token are arrays until they are read as lists of the same numbers."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord, SamplingParams
from rollout.requests.columns import (
    ARRAY_FIELDS,
    REQUESTED_COLUMNS,
    TOKEN_COLUMNS,
    as_array,
)
from rollout.requests.token_runs import TokenRun, TokenRuns
from rollout.version_spans import VersionSpans
from rollout.wire import columns_of


def test_each_token_column_has_its_fields_in_requests_params_and_runs():
    request_fields = DynamicInferenceRequest.__dataclass_fields__
    param_fields = SamplingParams.__dataclass_fields__
    run_fields = TokenRun.__struct_fields__
    for column in TOKEN_COLUMNS:
        assert column.field in request_fields
        assert column.prompt_field in {*request_fields, ""}
        assert column.wanted_by in {*param_fields, ""}
        assert column.run_field in {*run_fields, ""}
        if column.run_field and column.typecode:
            dtype = columns_of(TokenRun)[column.run_field].dtype
            assert dtype == columns_of(TokenRuns)[column.run_field].dtype == column.typecode
    requested = {column.run_field for column in REQUESTED_COLUMNS}
    optional = zip(run_fields[::-1], TokenRun.__struct_defaults__[::-1], strict=False)
    assert {name for name, default in optional if default is None} == requested
    flags = {name for name in TokenRuns.__struct_fields__ if name.startswith("has_")}
    assert flags == {f"has_{name}" for name in requested}


def request_of_arrays(num_tokens: int = 4) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id=7,
        prompt_tokens=[1, 2, 3],
        generated_tokens=np.arange(num_tokens, dtype=np.int32),
        generated_log_probs=np.arange(num_tokens, dtype=np.float32) / 8,
        tpot=np.arange(num_tokens, dtype=np.float64) / 4,
        context_kv_version_min=np.zeros(num_tokens, np.int32),
        context_kv_version_mean=np.full(num_tokens, 0.5),
        policy_spans=VersionSpans([(3 + num_tokens, 1)]),
        kv_spans=VersionSpans([(2 + num_tokens, 1)]),
    )


def made_lists(request: DynamicInferenceRequest) -> set[str]:
    return {name for name in ARRAY_FIELDS if isinstance(vars(request).get(name), list)}


def test_an_array_becomes_one_list_at_its_first_read():
    request = request_of_arrays()
    assert made_lists(request) == set()
    tokens = request.generated_tokens
    assert tokens == [0, 1, 2, 3]
    assert all(type(token) is int for token in tokens)
    tokens.append(9)
    assert request.generated_tokens is tokens
    assert request.num_generated_tokens == 5
    assert made_lists(request) == {"generated_tokens"}
    assert request.tpot == [0.0, 0.25, 0.5, 0.75]


def test_copies_merges_and_checkpoints_make_no_lists():
    request = request_of_arrays()
    record = DynamicInferenceRequestRecord.from_request(request)
    assert request.num_tokens == 7
    assert "generated 4 tokens" in str(request)
    request.freeze_versions(3)
    copied, merged = record.copy(), record.merge()
    record.checkpoint()
    record.serialize_apart()
    assert made_lists(request) == made_lists(copied.current) == made_lists(merged) == set()
    assert record.current.prompt_tokens.tolist() == [1, 2, 3, 0, 1, 2, 3]
    assert made_lists(record.current) >= {"generated_tokens", "tpot"}  # empty ones, to append to


def test_a_field_that_was_never_set_is_none_and_an_unknown_one_is_no_attribute():
    request = DynamicInferenceRequest(request_id=0)
    assert request.generated_tokens == []
    assert request.prompt_log_probs is None
    assert DynamicInferenceRequest.tpot is None
    del request.generated_tokens
    with pytest.raises(AttributeError, match="DynamicInferenceRequest has no generated_tokens"):
        _ = request.generated_tokens


def test_a_copy_has_lists_of_its_own():
    request = request_of_arrays()
    copied = request.copy()
    copied.generated_tokens.append(5)
    assert request.generated_tokens == [0, 1, 2, 3]
    request.generated_tokens.append(6)
    assert request.copy().generated_tokens == [0, 1, 2, 3, 6]
    assert copied.generated_tokens == [0, 1, 2, 3, 5]


def test_copy_of_a_growing_array_has_its_values_as_of_now():
    request = request_of_arrays(0)
    running = array("i", [4, 5])
    request.generated_tokens = running
    copied = request.copy()
    running.append(6)
    assert request.num_generated_tokens == 3
    assert copied.generated_tokens == [4, 5]
    assert request.generated_tokens is running


def test_arrays_of_other_kinds_are_left_as_they_are():
    for values in (np.zeros((2, 2)), np.zeros(2, np.float16), torch.zeros(2)):
        request = DynamicInferenceRequest(request_id=0, generated_log_probs=values)
        assert request.generated_log_probs is values


def test_segments_of_lists_and_of_arrays_merge_to_the_same():
    merged = []
    for are_lists in ((False, False), (True, False), (False, True), (True, True)):
        record = DynamicInferenceRequestRecord.from_request(request_of_arrays())
        record.checkpoint()
        record.current.generated_tokens = np.array([8, 9], np.int32)
        record.current.tpot = np.array([0.5, 0.5])
        record.current.context_kv_version_min = np.array([1, 1], np.int32)
        record.current.context_kv_version_mean = np.array([1.0, 1.5])
        record.current.hold_arrays()
        for segment, is_list in zip(record.requests, are_lists, strict=True):
            if is_list:
                segment.serialize()
        merged.append(record.merge())
    assert merged[0].generated_tokens == [0, 1, 2, 3, 8, 9]
    assert merged[0].generated_log_probs is not None
    assert merged[0].generated_log_probs[:4].tolist() == [0.0, 0.125, 0.25, 0.375]
    assert merged[0].generated_log_probs[4:].isnan().all()
    for other in merged[1:]:
        for name in set(ARRAY_FIELDS) - {"generated_log_probs"}:
            assert getattr(other, name) == getattr(merged[0], name)
        assert torch.equal(
            torch.nan_to_num(other.generated_log_probs),
            torch.nan_to_num(merged[0].generated_log_probs),
        )


@given(st.lists(st.integers(-(2**70), 2**70)) | st.lists(st.floats() | st.integers()))
def test_a_column_holds_the_same_numbers_or_there_is_none(values):
    column = as_array(values)
    if column is not None:
        assert [repr(value) for value in column.tolist()] == [repr(value) for value in values]
    is_simple = values and (
        all(type(v) is float for v in values)
        or all(type(v) is int and -(2**63) <= v < 2**63 for v in values)
    )
    assert (column is not None) == bool(is_simple)


@pytest.mark.parametrize("values", [[2**31 - 1], [2**31], [-(2**31)], [-(2**31) - 1]])
def test_integers_at_the_limits_of_int32_stay_what_they_are(values):
    column = as_array(values)
    assert column is not None
    assert column.tolist() == values
    assert column.itemsize == (4 if -(2**31) <= values[0] < 2**31 else 8)


def test_integers_beyond_int64_have_no_column():
    assert as_array([0, 2**63]) is None
