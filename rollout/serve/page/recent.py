"""RecentSamples: the latest finished samples of a server, and their form on the page.

Made by `rollout.serve.server`. LiveRequests adds the samples of a request when the request is over;
`rollout.serve.page.routes` reads them.
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

    serial: its number among all finished samples of the server, from 0. time: end of its request,
    in seconds since 1970. num_tokens: tokens of its prompt and output.
    """

    serial: int
    time: float
    record: DynamicInferenceRequestRecord
    num_tokens: int


class RecentSamples:
    """Keeps up to MAX_SAMPLES samples and MAX_TOKENS tokens, and drops the oldest first.

    num_added: number of samples added since the server's start, which is the next sample's serial.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._num_tokens = 0
        self.num_added = 0

    def add_ended(self, futures: Iterable[RequestFuture]) -> None:
        """Add the records of the futures that have one, and drop the oldest samples over the
        limits. Records become text only when a page asks, in `shown_sample`."""
        for future in futures:
            if not future.done() or future.cancelled() or future.exception() is not None:
                continue
            record = future.result()
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
        """Return the samples from `serial` on, at most the latest `limit`, oldest first."""
        found: list[Sample] = []
        for sample in reversed(self._samples):
            if sample.serial < serial or len(found) == limit:
                break
            found.append(sample)
        return found[::-1]


def shown_sample(sample: Sample, texts: TokenTexts) -> dict[str, Any]:
    """Return a sample as JSON for the page.

    It has the end of the prompt, the first generated tokens with their log-probs, weights versions
    and KV staleness, and the number of all generated tokens by staleness. Staleness is relative to
    the version at which the sample ended. "log_probs" is None unless the request asked for them.
    "first_token_s" and "token_s" are the time to the first token and the mean time between two
    tokens, in seconds; None if there were none.
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
    between = np.asarray(request.tpot or [], dtype=np.float64)[1:]  # [0]: from the entry
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
