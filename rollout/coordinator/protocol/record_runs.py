"""Runs of tokens out of a request's record, and a record made of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollout.coordinator.protocol.messages import Sample, TokenRun, TopNRun
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans

# A segment, and the first of its generated tokens that is meant.
_Tail = tuple[DynamicInferenceRequest, int]


def token_run(record: DynamicInferenceRequestRecord, offset: int) -> TokenRun | None:
    """The generated tokens from `offset` on with all that was stamped on them; None without any.

    What it costs depends on how many these are, not on those before.
    """
    tails = _tails(record, offset)
    if not tails:
        return None
    num_prompt, num_tokens = len(record[0].prompt_tokens), record.current.num_tokens
    versions = record.current.stamped_policy_spans().slice(num_prompt + offset, num_tokens)
    log_probs = _values(record, tails, "generated_log_probs", float("nan"))
    top_n = _values(record, tails, "generated_top_n_logprobs", None)
    return TokenRun(
        offset=offset,
        entry_version=record[0].weights_version,
        token_ids=_array(tails, "generated_tokens", np.int32),
        policy_versions=versions.to_array(),
        context_kv_version_min=_array(tails, "context_kv_version_min", np.int32),
        context_kv_version_mean=_array(tails, "context_kv_version_mean", np.float64),
        log_probs=None if log_probs is None else np.array(log_probs, dtype=np.float32),
        top_n=None if top_n is None else TopNRun.from_rows(top_n),
    )


def _tails(record: DynamicInferenceRequestRecord, offset: int) -> list[_Tail]:
    """Where the generated tokens from `offset` on are."""
    tails: list[_Tail] = []
    for segment in record.requests:
        num_generated = len(segment.generated_tokens)
        if offset < num_generated:
            tails.append((segment, max(offset, 0)))
        offset -= num_generated
    return tails


def _array(tails: Sequence[_Tail], name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    values = [value for segment, start in tails for value in getattr(segment, name)[start:]]
    return np.array(values, dtype=dtype)


def _values(
    record: DynamicInferenceRequestRecord, tails: Sequence[_Tail], name: str, placeholder: object
) -> list[Any] | None:
    """As `merge` has them: None if no segment has values, `placeholder` where one has none."""
    if all(getattr(segment, name) is None for segment in record.requests):
        return None
    values: list[Any] = []
    for segment, start in tails:
        own = getattr(segment, name)
        num_tokens = len(segment.generated_tokens) - start
        values += [placeholder] * num_tokens if own is None or not len(own) else own[start:]
    return values


def resumed_record(
    sample: Sample,
    params: SamplingParams,
    prompt_tokens: Sequence[int],
    *,
    prompt: str | None,
    priority: int,
) -> DynamicInferenceRequestRecord:
    """The record of a request whose tokens so far are `sample.resumed`, to be added to an engine.

    What only its first engine knew, such as the times of its tokens, is not there.
    """
    run = sample.resumed
    assert run is not None
    spans = VersionSpans()
    spans.append(len(prompt_tokens), run.entry_version)
    for version in run.policy_versions.tolist():
        spans.append(1, version)
    log_probs = None if run.log_probs is None else run.log_probs.tolist()
    return DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(
            request_id=sample.request_id,
            prompt=prompt,
            prompt_tokens=torch.tensor(list(prompt_tokens), dtype=torch.int64),
            sampling_params=params,
            priority=priority,
            seed=sample.seed,
            weights_version=run.entry_version,
            generated_tokens=run.token_ids.tolist(),
            generated_log_probs=log_probs if params.return_log_probs else None,
            generated_top_n_logprobs=None if run.top_n is None else run.top_n.rows(),
            tpot=[float("nan")] * len(run),
            policy_spans=spans,
            context_kv_version_min=run.context_kv_version_min.tolist(),
            context_kv_version_mean=run.context_kv_version_mean.tolist(),
        )
    )
