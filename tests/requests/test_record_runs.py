"""TokenRun.of: the tokens of a record from any offset equal those of the merged request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollout import DynamicInferenceRequest, DynamicInferenceRequestRecord
from rollout.requests.token_runs import TokenRun, TopNRun
from rollout.version_spans import VersionSpans

NUM_TOKENS = 6


class Unmerged(DynamicInferenceRequestRecord):
    """A record that refuses `merge`, which copies the whole history."""

    def merge(self, tokenizer: object = None) -> DynamicInferenceRequest:
        raise AssertionError("merged, only to find the new tokens")


def generate(
    request: DynamicInferenceRequest, tokens: list[int], version: int, *, has_values: bool
) -> None:
    request.generated_tokens = tokens
    request.policy_spans.append(len(tokens), version)
    request.context_kv_version_min = [version - 1] * len(tokens)
    request.context_kv_version_mean = [version - 0.5] * len(tokens)
    if has_values:
        request.generated_log_probs = [-token / 8 for token in tokens]
        request.generated_ranks = [token + 1 for token in tokens]
        request.generated_top_n_logprobs = [{token: -token / 8} for token in tokens]


def record(*, values_in: tuple[int, ...]) -> DynamicInferenceRequestRecord:
    """Six tokens in four segments, of which the second has none."""
    history = DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=0, prompt_tokens=torch.arange(3), policy_spans=VersionSpans([(3, 4)])
        )
    )
    for index, tokens in enumerate(([1, 2], [], [3, 4, 5], [6])):
        if index:
            history.checkpoint()
        generate(history.current, tokens, 5 + index, has_values=index in values_in)
    return history


def run_of_merged(history: DynamicInferenceRequestRecord, offset: int) -> TokenRun:
    merged = history.merge()
    log_probs, top_n = merged.generated_log_probs, merged.generated_top_n_logprobs
    ranks = merged.generated_ranks
    return TokenRun(
        offset=offset,
        entry_version=0,
        token_ids=np.array(merged.generated_tokens[offset:], dtype=np.int32),
        policy_versions=merged.policy_versions[offset:].numpy(),
        context_kv_version_min=np.array(merged.context_kv_version_min[offset:], dtype=np.int32),
        context_kv_version_mean=np.array(merged.context_kv_version_mean[offset:]),
        log_probs=None if log_probs is None else log_probs[offset:].numpy(),
        ranks=None if ranks is None else np.array(ranks[offset:], dtype=np.int32),
        top_n=None if top_n is None else TopNRun.from_rows(top_n[offset:]),
    )


@pytest.mark.parametrize("values_in", [(), (0, 2, 3), (0,), (2,)])
@pytest.mark.parametrize("offset", range(NUM_TOKENS))
def test_token_run_is_the_tail_of_the_merged_record(
    offset: int, values_in: tuple[int, ...]
) -> None:
    history = record(values_in=values_in)
    assert TokenRun.of(Unmerged(history.requests), offset) == run_of_merged(history, offset)


@pytest.mark.parametrize("offset", [NUM_TOKENS, NUM_TOKENS + 1])
def test_token_run_of_a_record_without_new_tokens_is_none(offset: int) -> None:
    assert TokenRun.of(Unmerged(record(values_in=(0,)).requests), offset) is None
