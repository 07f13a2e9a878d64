"""check_well_formed and admit: malformed, impossible and clamped requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import (
    BlockOverflowError,
    InvalidRequestError,
    MaxSequenceLengthOverflowError,
    TokenLimitClamped,
    TokenOverflowError,
)
from rollout.sampling_params import SamplingParams
from rollout.scheduling.admission import AdmissionLimits, admit, check_well_formed

LIMITS = AdmissionLimits(
    vocab_size=100,
    max_sequence_length=50,
    max_pool_tokens=32,
    max_tokens_per_step=16,
    enable_chunked_prefill=True,
    can_score_prompts=True,
)


@pytest.mark.parametrize(
    ("prompt", "params", "limits", "message"),
    [
        ([], SamplingParams(), LIMITS, "prompt is empty"),
        ([1, 100], SamplingParams(), LIMITS, "token id 100 is outside"),
        ([5, -1, 100], SamplingParams(), LIMITS, "token id -1 is outside"),
        ([1, 2], SamplingParams(num_tokens_total=2), LIMITS, "num_tokens_total=2 leaves no token"),
        ([1, 2], SamplingParams(top_n_logprobs=101), LIMITS, "top_n_logprobs=101 is more than"),
        (
            [1, 2],
            SamplingParams(skip_prompt_log_probs=False),
            replace(LIMITS, can_score_prompts=False),
            "materialize_only_last_token_logits=False",
        ),
    ],
)
def test_a_malformed_request_is_refused_with_its_reason(
    prompt: list[int], params: SamplingParams, limits: AdmissionLimits, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_well_formed(prompt, params, limits)


def test_a_request_at_the_edge_of_every_range_is_well_formed() -> None:
    params = SamplingParams(num_tokens_total=3, skip_prompt_log_probs=False, top_n_logprobs=100)
    check_well_formed([0, 99], params, LIMITS)


@pytest.mark.parametrize(
    ("num_prompt", "limits", "error_type"),
    [
        (50, replace(LIMITS, max_pool_tokens=100), MaxSequenceLengthOverflowError),
        (33, LIMITS, BlockOverflowError),
        (17, replace(LIMITS, enable_chunked_prefill=False), TokenOverflowError),
    ],
)
def test_admit_returns_a_permanent_error_for_an_impossible_request(
    num_prompt: int, limits: AdmissionLimits, error_type: type[Exception]
) -> None:
    admission = admit(7, num_prompt, SamplingParams(), limits)
    assert type(admission.error) is error_type
    assert admission.error.request_id == 7
    assert not admission.error.is_transient
    assert admission.clamped is None


@pytest.mark.parametrize(
    ("num_prompt", "limits"),
    [
        (49, replace(LIMITS, max_pool_tokens=100)),
        (32, LIMITS),
        (16, replace(LIMITS, enable_chunked_prefill=False)),
    ],
)
def test_admit_accepts_one_token_less_than_impossible(
    num_prompt: int, limits: AdmissionLimits
) -> None:
    assert admit(7, num_prompt, SamplingParams(num_tokens_to_generate=1), limits).error is None


def test_prompt_and_output_but_one_fill_the_pool_exactly() -> None:
    fits = admit(7, 10, SamplingParams(num_tokens_to_generate=23), LIMITS)
    assert (fits.max_length, fits.clamped) == (33, None)
    beyond = admit(7, 10, SamplingParams(num_tokens_to_generate=24), LIMITS)
    assert beyond.max_length == 33
    assert type(beyond.clamped) is TokenLimitClamped
    assert beyond.clamped.is_transient
    assert beyond.clamped.request_id == 7


def test_admit_clamps_with_the_wanted_and_the_possible_number() -> None:
    admission = admit(7, 10, SamplingParams(num_tokens_total=60), LIMITS)
    assert admission.clamped is not None
    assert "50 new tokens were asked for" in str(admission.clamped)
    assert "leave 23" in str(admission.clamped)


def test_a_request_without_a_limit_gets_all_that_fits_and_no_clamp() -> None:
    admission = admit(7, 10, SamplingParams(), replace(LIMITS, max_pool_tokens=1000))
    assert (admission.max_length, admission.clamped) == (50, None)


def test_the_total_limit_counts_the_prompt() -> None:
    assert admit(7, 10, SamplingParams(num_tokens_total=12), LIMITS).max_length == 12
    assert admit(7, 10, SamplingParams(num_tokens_to_generate=12), LIMITS).max_length == 22


@given(st.integers(1, 60), st.integers(1, 60) | st.none(), st.integers(2, 60), st.integers(1, 60))
def test_admit_returns_the_longest_length_that_fits(
    num_prompt: int, num_new: int | None, longest: int, pool: int
) -> None:
    limits = replace(LIMITS, max_sequence_length=longest, max_pool_tokens=pool)
    admission = admit(1, num_prompt, SamplingParams(num_tokens_to_generate=num_new), limits)
    possible = num_prompt + 1 <= longest and num_prompt <= pool
    assert (admission.error is None) == possible
    if possible:
        granted = admission.max_length - num_prompt
        assert granted >= 1
        wanted = range(1, 1 + (num_new or 200))
        fits = [n for n in wanted if num_prompt + n <= longest and num_prompt + n - 1 <= pool]
        assert granted == max(fits)
        assert (admission.clamped is not None) == (num_new is not None and granted < num_new)
