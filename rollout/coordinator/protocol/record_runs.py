"""Runs of tokens out of a request's record, and a record made of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollout.coordinator.protocol.messages import Sample, TokenRun, TopNRun
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans


def token_run(record: DynamicInferenceRequestRecord, offset: int) -> TokenRun | None:
    """The generated tokens from `offset` on with all that was stamped on them; None without any."""
    merged = record.merge()
    num_prompt, count = len(merged.prompt_tokens), len(merged.generated_tokens)
    if offset >= count:
        return None
    log_probs, top_n = merged.generated_log_probs, merged.generated_top_n_logprobs
    versions = merged.policy_spans.slice(num_prompt + offset, num_prompt + count).to_array()
    return TokenRun(
        offset=offset,
        entry_version=record[0].weights_version,
        token_ids=np.array(merged.generated_tokens[offset:], dtype=np.int32),
        policy_versions=versions.astype(np.int32),
        context_kv_version_min=np.array(merged.context_kv_version_min[offset:], dtype=np.int32),
        context_kv_version_mean=np.array(merged.context_kv_version_mean[offset:], dtype=np.float64),
        log_probs=None if log_probs is None else np.asarray(log_probs[offset:], dtype=np.float32),
        top_n=None if top_n is None else TopNRun.from_rows(top_n[offset:]),
    )


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
