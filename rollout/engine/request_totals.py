"""RequestTotals: what the requests of an engine got since its start: tokens, ends and latencies."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

# Upper bounds of the buckets of latencies in seconds: 1, 2, 5, 10 ms, ... up to 5,000 s.
LATENCY_BOUNDS_S = tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5))
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class LatencyCounts:
    """counts: latencies by bucket; the last bucket has those above all bounds. seconds: their
    sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    seconds: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a latency that occurred so many times."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += times
        self.seconds += seconds * times


@dataclass(slots=True)
class RequestTotals:
    """Only OutputProcessor writes it.

    num_generated_tokens: tokens that requests were given. num_begun_prompt_tokens: tokens of the
    prompts of requests that have got their first token here. finish_reasons: requests that have
    ended, by FINISH_REASONS. first_token, token, request: seconds from a request's entry to its
    first token, between two tokens of a request, and from the entry to the end of a request that
    was neither aborted nor failed.
    """

    num_generated_tokens: int = 0
    num_begun_prompt_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    first_token: LatencyCounts = field(default_factory=LatencyCounts)
    token: LatencyCounts = field(default_factory=LatencyCounts)
    request: LatencyCounts = field(default_factory=LatencyCounts)

    def add_first_token(self, num_prompt_tokens: int, seconds: float) -> None:
        """Count the first token of a request."""
        self.num_begun_prompt_tokens += num_prompt_tokens
        self.first_token.add(seconds)

    def add_end(self, finish_reason: str, seconds: float) -> None:
        """Count a request that has ended."""
        self.finish_reasons[finish_reason] += 1
        if finish_reason in ("stop", "length"):
            self.request.add(seconds)

    def as_stats(self) -> dict[str, Any]:
        """Return the fields of EngineStats by name."""
        return {
            "num_generated_tokens": self.num_generated_tokens,
            "num_begun_prompt_tokens": self.num_begun_prompt_tokens,
            "finish_reasons": tuple(self.finish_reasons.values()),
            "first_token_latency": tuple(self.first_token.counts),
            "first_token_seconds": self.first_token.seconds,
            "token_latency": tuple(self.token.counts),
            "token_seconds": self.token.seconds,
            "request_latency": tuple(self.request.counts),
            "request_seconds": self.request.seconds,
        }
