"""Histograms of whole numbers as plain columns, so that a row of metrics stays flat.

Written by `trainer_hooks.metrics.measure`. Read by `trainer_hooks.metrics.wandb_run` and by the
charts, dashboard and report of `trainer_hooks.train`. The columns `policy_staleness/hist/0`,
`policy_staleness/hist/1`, ... hold the counts of the values 0, 1, ... The last column,
`policy_staleness/hist/16+`, counts all values above 15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

NUM_BINS = 16
_INFIX = "/hist/"


def histogram_columns(name: str, values: torch.Tensor) -> dict[str, int]:
    """Return the counts of `values` by column, `<name>/hist/<bin>`, up to the largest value's bin.

    Fractions are rounded, and negative values count as 0. Returns {} without values.
    """
    if not values.numel():
        return {}
    bins = values.round().clamp(0, NUM_BINS).to(torch.int64)
    counts = torch.bincount(bins.flatten())
    return {f"{name}{_INFIX}{_label(i)}": count for i, count in enumerate(counts.tolist())}


def read_histogram(row: Mapping[str, Any], name: str) -> dict[int, int]:
    """Return the count of each bin of the histogram `name` in `row`, or {} if there is none.

    The last bin, NUM_BINS, counts all values from NUM_BINS on.
    """
    return read_histograms(row).get(name, {})


def read_histograms(row: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """Return the count of each bin of each histogram in a row, by name."""
    histograms: dict[str, dict[int, int]] = defaultdict(dict)
    for column, count in row.items():
        name, infix, label = column.rpartition(_INFIX)
        if infix and label.removesuffix("+").isdecimal() and isinstance(count, int):
            histograms[name][int(label.removesuffix("+"))] = count
    return {name: dict(sorted(counts.items())) for name, counts in histograms.items()}


def _label(index: int) -> str:
    return f"{index}+" if index == NUM_BINS else str(index)
