"""Shard and Cut: which part of a model, and of each weight, a tensor-parallel rank keeps.

Used by the layers and `rollout.models` when a model is built and loaded.
`rollout.weights.fingerprints` and `rollout.weights.lora_merge` use them to map between a whole
weight and this rank's part. Immutable values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.backends.ops.fingerprint import Places


class Range(NamedTuple):
    """Items [start, start + length) of a dimension or of a list of heads or experts. `is_counted`
    is False if a lower rank has the same items, so that sums over ranks skip this range."""

    start: int
    length: int
    is_counted: bool = True

    def of_width(self, width: int, *, after: int = 0) -> Range:
        """Return the range in smaller units, `width` per item, such as dims of heads. `after` units
        come before the first item."""
        return Range(after + self.start * width, self.length * width, self.is_counted)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of the `size` ranks that share a model. A single rank keeps the whole model."""

    rank: int = 0
    size: int = 1

    def range_of(self, num_items: int) -> Range:
        """Return this rank's share of `num_items`. Shares differ by at most one item in length."""
        start, end = (num_items * rank // self.size for rank in (self.rank, self.rank + 1))
        return Range(start, end - start)

    def kv_heads_of(self, num_kv_heads: int) -> Range:
        """Return the KV heads that this rank's query heads read. If there are fewer KV heads than
        ranks, several ranks read the same head."""
        if num_kv_heads >= self.size:
            return self.range_of(num_kv_heads)
        is_first = self.rank * num_kv_heads % self.size == 0
        return Range(self.rank * num_kv_heads // self.size, 1, is_first)


ALONE = Shard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a weight of `shape` that a rank keeps: `ranges` of its dimension `dim`."""

    shape: torch.Size
    dim: int
    ranges: tuple[Range, ...]

    @property
    def kept_shape(self) -> torch.Size:
        length = sum(each.length for each in self.ranges)
        return torch.Size((*self.shape[: self.dim], length, *self.shape[self.dim + 1 :]))

    def of(self, whole: Tensor) -> Tensor:
        """Return the kept part of the whole weight. The part is a copy if it has several ranges,
        else a view."""
        parts = [whole.narrow(self.dim, each.start, each.length) for each in self.ranges]
        if not parts:
            return whole.narrow(self.dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def rows_of(self, rows: Tensor, first_row: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the kept parts of `rows`, whose first row is row `first_row` of the whole weight.
        Yields pairs: the first row of the values within the kept part, and the values."""
        if self.dim:
            yield first_row, self.of(rows)
            return
        end_row = first_row + len(rows)
        for each, place in zip(self.ranges, self._places(), strict=True):
            first, end = max(each.start, first_row), min(each.start + each.length, end_row)
            if first < end:
                yield place + first - each.start, rows[first - first_row : end - first_row]

    def counted_parts(self, kept: Tensor) -> Iterator[tuple[Tensor, Places]]:
        """Yield the ranges of the kept part that count for the whole weight's fingerprint. Yields
        pairs: the values, and the places of these elements in the whole weight."""
        inner = math.prod(self.shape[self.dim + 1 :])
        for each, place in zip(self.ranges, self._places(), strict=True):
            if each.is_counted:
                places = Places(
                    each.start * inner, each.length * inner, self.shape[self.dim] * inner
                )
                yield kept.narrow(self.dim, place, each.length), places

    def of_bias(self) -> Cut | None:
        """Return the cut of the bias that belongs to a cut matrix; None if the bias is whole."""
        return None if self.dim else replace(self, shape=self.shape[:1])

    def _places(self) -> list[int]:
        """Return the start of each range within the kept part."""
        return list(accumulate((each.length for each in self.ranges), initial=0))[:-1]


def cut_to(ranges: Iterable[Range], shape: tuple[int, ...], dim: int = 0) -> Cut | None:
    """Return the cut of a weight of `shape` to these ranges of `dim`. Return None if the ranges are
    the whole dimension and all counted."""
    ranges = tuple(ranges)
    is_whole = all(each.is_counted for each in ranges)
    is_whole = is_whole and sum(each.length for each in ranges) == shape[dim]
    return None if is_whole else Cut(shape=torch.Size(shape), dim=dim, ranges=ranges)
