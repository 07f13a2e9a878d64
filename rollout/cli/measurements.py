"""The measurements of `rollout bench`, as percentiles, JSON and a table.

Used by `rollout.cli.bench` and `rollout.cli.bench_serving`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timing of one request that succeeded.

    first_token_s: seconds from the request's start to its first token.
    total_s: seconds from the request's start to its last token."""

    num_prompt_tokens: int
    num_generated_tokens: int
    first_token_s: float
    total_s: float

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first, or None for a request of one token."""
        num_further = self.num_generated_tokens - 1
        return (self.total_s - self.first_token_s) / num_further if num_further > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of times in seconds; None if there are no times."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        if not values:
            return cls(p50=None, p90=None, p99=None)
        found = np.percentile(np.asarray(values), PERCENTS)
        return cls(**{f"p{percent}": float(x) for percent, x in zip(PERCENTS, found, strict=True)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The measurements of a run. Tokens and percentiles count only requests that succeeded.

    first_error: message of one failed request; None without failures.
    seconds: wall-clock seconds of the run.
    cpu_seconds: CPU seconds of the engine's process; None if not measured."""

    num_requests: int
    num_failed: int
    first_error: str | None
    num_prompt_tokens: int
    num_generated_tokens: int
    seconds: float
    cpu_seconds: float | None
    first_token_s: Percentiles
    per_token_s: Percentiles
    total_s: Percentiles

    @classmethod
    def of(
        cls,
        timings: Sequence[Timing],
        *,
        errors: Sequence[str],
        seconds: float,
        cpu_seconds: float | None = None,
    ) -> Summary:
        per_token = [each for timing in timings if (each := timing.per_token_s) is not None]
        return cls(
            num_requests=len(timings) + len(errors),
            num_failed=len(errors),
            first_error=next(iter(errors), None),
            num_prompt_tokens=sum(timing.num_prompt_tokens for timing in timings),
            num_generated_tokens=sum(timing.num_generated_tokens for timing in timings),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            first_token_s=Percentiles.of([timing.first_token_s for timing in timings]),
            per_token_s=Percentiles.of(per_token),
            total_s=Percentiles.of([timing.total_s for timing in timings]),
        )

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and the rates derived from them, by name."""
        rates = {
            "generated_tokens_per_s": self.num_generated_tokens / self.seconds,
            "prompt_tokens_per_s": self.num_prompt_tokens / self.seconds,
            "requests_per_s": (self.num_requests - self.num_failed) / self.seconds,
        }
        if self.cpu_seconds:
            rates["generated_tokens_per_cpu_s"] = self.num_generated_tokens / self.cpu_seconds
        return asdict(self) | rates

    def headline(self, title: str) -> str:
        """Return lines with `title`, the numbers of requests and tokens, and each rate."""
        values, done = self.as_json(), self.num_requests - self.num_failed
        lines = [
            f"{title}: {done} of {self.num_requests} requests done in {self.seconds:,.1f} s",
            f"{self.num_prompt_tokens:,} prompt tokens, {self.num_generated_tokens:,} generated",
            *(f"{values[name]:>12,.1f} {unit}" for name, unit in _RATES.items() if name in values),
        ]
        return "\n".join(lines)

    def table(self) -> Table:
        """Return a table of the percentiles in milliseconds."""
        table = Table(box=None, pad_edge=False)
        for name in ("", *(f"p{percent}" for percent in PERCENTS)):
            table.add_column(name, justify="right" if name else "left")
        values = self.as_json()
        for name, label in _LATENCIES.items():
            table.add_row(label, *_milliseconds(values[name]))
        return table


_RATES = {
    "generated_tokens_per_s": "generated tokens/s",
    "generated_tokens_per_cpu_s": "generated tokens/CPU s",
    "prompt_tokens_per_s": "prompt tokens/s",
    "requests_per_s": "requests/s",
}
_LATENCIES = {
    "first_token_s": "time to first token, ms",
    "per_token_s": "time per later token, ms",
    "total_s": "whole request, ms",
}


def _milliseconds(percentiles: Mapping[str, float | None]) -> list[str]:
    return ["-" if value is None else f"{1e3 * value:,.1f}" for value in percentiles.values()]
