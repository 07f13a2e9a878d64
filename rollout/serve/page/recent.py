"""RecentSamples: the latest finished samples of a server, and their JSON for the page.

`rollout.serve.server` makes it. LiveRequests adds the samples of each ended request, and
`rollout.serve.page.routes` reads them. `rollout.serve.page.running` uses a limit of this module.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.coordinator.client.streams import RequestFuture
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.serve.token_texts import TokenTexts

MAX_SAMPLES = 1000
MAX_TOKENS = 500_000  # some 28 bytes each
MAX_SHOWN_TOKENS = 400
MAX_SHOWN_PROMPT_TOKENS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A finished sample.

    serial: number of the sample among the server's finished samples, from 0.
    time: Unix time in seconds at which the request ended.
    num_tokens: tokens of prompt and output.
    """

    serial: int
    time: float
    record: DynamicInferenceRequestRecord
    num_tokens: int


class RecentSamples:
    """Keeps up to MAX_SAMPLES samples and MAX_TOKENS tokens, and drops the oldest samples first.

    num_added: number of samples added so far, which is the serial of the next sample.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._num_tokens = 0
        self.num_added = 0

    def add_ended(self, futures: Iterable[RequestFuture]) -> None:
        """Add the records of finished futures. Drop the oldest samples above the limits."""
        for future in futures:
            if not future.done() or future.cancelled() or future.exception() is not None:
                continue
            record = future.result()  # `shown_sample` decodes it when a page asks
            num_tokens = sum(segment.num_tokens for segment in record.requests)
            sample = Sample(
                serial=self.num_added, time=time.time(), record=record, num_tokens=num_tokens
            )
            self.num_added += 1
            self._samples.append(sample)
            self._num_tokens += num_tokens
            while len(self._samples) > MAX_SAMPLES or self._num_tokens > MAX_TOKENS:
                self._num_tokens -= self._samples.popleft().num_tokens

    def since(self, serial: int, limit: int) -> list[Sample]:
        """Return the latest `limit` samples from `serial` on, oldest first."""
        found: list[Sample] = []
        for sample in reversed(self._samples):
            if sample.serial < serial or len(found) == limit:
                break
            found.append(sample)
        return found[::-1]


def shown_sample(sample: Sample, texts: TokenTexts) -> dict[str, Any]:
    """Return a sample as JSON for the page.

    It has the end of the prompt and the first generated tokens, with their log-probs, weights
    versions and KV staleness. Staleness is relative to the version at which the sample ended.

    policy_counts, kv_counts: number of generated tokens by staleness.
    log_probs: rounded log-probs, or None if the request asked for none.
    first_token_s: seconds to the first token, or None.
    token_s: mean seconds between two tokens, or None if there are fewer than two tokens.
    """
    request = sample.record.merge()
    num_prompt = len(request.prompt_tokens)
    versions = request.policy_versions.numpy()
    now = request.completed_at_version or request.weights_version
    policy_ages = now - versions
    _, all_kv_ages = request.staleness_at(now)
    kv_ages = all_kv_ages[num_prompt:].numpy()
    log_probs = request.generated_log_probs
    shown = slice(0, MAX_SHOWN_TOKENS)
    prompt = request.prompt_tokens[-MAX_SHOWN_PROMPT_TOKENS:].tolist()
    between = np.asarray(request.tpot or [], dtype=np.float64)[1:]  # without the first token's
    between = between[np.isfinite(between)]  # NaN for tokens of an engine that failed
    return {
        "serial": sample.serial,
        "time": sample.time,
        "finish_reason": request.finish_reason,
        "version": now,
        "num_prompt_tokens": num_prompt,
        "num_tokens": request.num_generated_tokens,
        "first_token_s": request.ttft,
        "token_s": float(between.mean()) if len(between) else None,
        "prompt": "".join(texts.pieces_of(prompt)),
        "tokens": texts.pieces_of(request.generated_tokens[shown]),
        "versions": versions[shown].tolist(),
        "kv_staleness": kv_ages[shown].tolist(),
        "log_probs": None
        if log_probs is None
        else [round(float(value), 3) for value in log_probs[shown]],
        "policy_counts": _counts(policy_ages),
        "kv_counts": _counts(kv_ages),
    }


def _counts(ages: npt.NDArray[np.integer[Any]]) -> dict[str, int]:
    values, counts = np.unique(ages, return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}
