"""Histograms of whole numbers as plain columns, so that a row of metrics stays flat.

Used by `rollout_metrics`, the wandb run and the charts of a run. The columns
`policy_staleness/hist/0`, `/1`, ... hold the counts of the values 0, 1, ...; the last one, `/16+`,
counts all values above 15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

NUM_BINS = 16
_INFIX = "/hist/"


def histogram_columns(name: str, values: torch.Tensor) -> dict[str, int]:
    """Return counts by column `<name>/hist/<bin>`, from 0 to the bin of the largest value.

    Fractions are rounded to the nearest whole number. Negative values count as 0.
    """
    if not values.numel():
        return {}
    bins = values.round().clamp(0, NUM_BINS).to(torch.int64)
    counts = torch.bincount(bins.flatten())
    return {f"{name}{_INFIX}{_label(i)}": count for i, count in enumerate(counts.tolist())}


def read_histogram(row: Mapping[str, Any], name: str) -> dict[int, int]:
    """Return {bin: count} of the columns that `row` has for `name`. The open last bin is
    NUM_BINS.
    """
    return read_histograms(row).get(name, {})


def read_histograms(row: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """Return all histograms of a row, by name."""
    histograms: dict[str, dict[int, int]] = defaultdict(dict)
    for column, count in row.items():
        name, infix, label = column.rpartition(_INFIX)
        if infix and label.removesuffix("+").isdecimal() and isinstance(count, int):
            histograms[name][int(label.removesuffix("+"))] = count
    return {name: dict(sorted(counts.items())) for name, counts in histograms.items()}


def _label(index: int) -> str:
    return f"{index}+" if index == NUM_BINS else str(index)
