"""merged_metrics: the metrics of a batch, computed from the metrics of its micro-batches.

Used by `trainer_hooks.update.micro_batches`. The function has no side effects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def merged_metrics(parts: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Return the metrics of a batch from `parts`: each micro-batch's metrics and number of tokens.

    The result equals the metrics of the batch in one piece. `loss` is the sum of the parts' losses,
    which are already divided by the batch's denominator.
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
        elif name.endswith("eff_sample_size"):
            merged[name] = _effective_sample_size(name, parts)
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
    counts = _counts(name, parts)
    total = sum(
        count * metrics.get(name, 0.0) for (metrics, _), count in zip(parts, counts, strict=True)
    )
    return total / sum(counts) if any(counts) else 0.0


def _effective_sample_size(name: str, parts: Sequence[tuple[dict[str, float], int]]) -> float:
    # (sum w)^2 / (n sum w^2), with sums from each part's effective size and mean weight.
    prefix = name.removesuffix("eff_sample_size")
    mean_name = f"{prefix}mean" if prefix.startswith("sampling/") else f"{prefix}weight_mean"
    counts = _counts(name, parts)
    total = squares = 0.0
    for (metrics, _), count in zip(parts, counts, strict=True):
        if size := metrics.get(name, 0.0):
            total += count * metrics[mean_name]
            squares += count * metrics[mean_name] ** 2 / size
    return total**2 / (sum(counts) * squares) if squares else 0.0


def _counts(name: str, parts: Sequence[tuple[dict[str, float], int]]) -> list[float]:
    """Return how many tokens of each part the metric covers: all, a lag cell's, or stale tokens."""
    if name.startswith("by_lag/") and not name.endswith("/token_fraction"):
        share_name = f"{name.rpartition('/')[0]}/token_fraction"
    elif name == "stale_clip_fraction":
        share_name = "stale_fraction"
    else:
        return [float(count) for _, count in parts]
    return [count * metrics.get(share_name, 0.0) for metrics, count in parts]
