"""The metrics of a batch from those of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence


def merged_metrics(parts: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """The metrics of a batch from those of its micro-batches, each with its number of tokens.

    They are those of the batch at once, but for effective sample sizes, which are means over the
    micro-batches. `loss` is their sum: each was divided by the denominator of the batch.
    """
    parts = [(metrics, count) for metrics, count in parts if count] or list(parts[:1])
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics, _ in parts for name in metrics):
        values = [metrics[name] for metrics, _ in parts if name in metrics]
        if name == "loss":
            merged[name] = sum(values)
        elif name.endswith(("_min", "/min")):
            merged[name] = min(values)
        elif name.endswith(("_max", "/max")):
            merged[name] = max(values)
        else:
            merged[name] = _weighted_mean(name, parts)
    for name in merged:
        mean_name = f"{name.removesuffix('std')}mean"
        if name.endswith("std"):  # law of total variance
            squares = [
                ({name: metrics[name] ** 2 + metrics[mean_name] ** 2}, count)
                for metrics, count in parts
            ]
            variance = _weighted_mean(name, squares) - merged[mean_name] ** 2
            merged[name] = math.sqrt(max(variance, 0.0))
    return merged


def _weighted_mean(name: str, parts: Sequence[tuple[dict[str, float], int]]) -> float:
    """The mean over the tokens that `name` is about: all, those of a cell, or the stale ones."""
    share_name = None
    if name.startswith("by_lag/") and not name.endswith("/token_fraction"):
        share_name = f"{name.rpartition('/')[0]}/token_fraction"
    elif name == "stale_clip_fraction":
        share_name = "stale_fraction"
    total = num_tokens = 0.0
    for metrics, count in parts:
        weight = count * (1.0 if share_name is None else metrics.get(share_name, 0.0))
        total += weight * metrics.get(name, 0.0)
        num_tokens += weight
    return total / num_tokens if num_tokens else 0.0
