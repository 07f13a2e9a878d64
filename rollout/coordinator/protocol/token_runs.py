"""TokenRun: generated tokens with their provenance, cut and joined by offset."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.coordinator.protocol.field_codecs import WireData, wire_data
from rollout.coordinator.protocol.field_types import (
    Count,
    Doubles,
    LogProbs,
    Tokens,
    Version,
    Versions,
)
from rollout.errors import ProtocolError
from rollout.requests.codec import TopN

# The arrays of a TokenRun.
_PER_TOKEN = (
    "token_ids",
    "policy_versions",
    "context_kv_version_min",
    "context_kv_version_mean",
    "log_probs",
)


@wire_data
class TopNRun(WireData):
    """The most probable tokens at each of n positions, one after the other.

    counts: int32 [n], how many each position has, -1 where there is no value. token_ids: int32,
    log_probs: float32, both [sum of the counts].
    """

    counts: Versions
    token_ids: Tokens
    log_probs: LogProbs

    def __post_init__(self) -> None:
        counts_n = np.asarray(self.counts, dtype=np.int64)
        total = int(np.maximum(counts_n, 0).sum())
        if (counts_n < -1).any() or not total == len(self.token_ids) == len(self.log_probs):
            raise ProtocolError(
                f"TopNRun: {total} counted, {len(self.token_ids)} ids, "
                f"{len(self.log_probs)} log-probs"
            )

    @classmethod
    def from_rows(cls, rows: TopN) -> TopNRun:
        """Return the run of the documents' form: a dictionary, or None, per position."""
        filled = [row for row in rows if row is not None]
        return cls(
            counts=np.array([-1 if row is None else len(row) for row in rows], dtype=np.int32),
            token_ids=np.array([key for row in filled for key in row], dtype=np.int32),
            log_probs=np.array([row[key] for row in filled for key in row], dtype=np.float32),
        )

    def rows(self) -> TopN:
        """Return the documents' form of it, in the same order."""
        pairs = zip(self.token_ids.tolist(), self.log_probs.tolist(), strict=True)
        return [
            None if count < 0 else dict(next(pairs) for _ in range(count))
            for count in self.counts.tolist()
        ]

    def from_position(self, start: int) -> TopNRun:
        """Return positions [start, n)."""
        num_skipped = int(np.maximum(self.counts[:start], 0).sum())
        return TopNRun(
            counts=self.counts[start:],
            token_ids=self.token_ids[num_skipped:],
            log_probs=self.log_probs[num_skipped:],
        )


@wire_data
class TokenRun(WireData):
    """Generated tokens [offset, offset + n) of a request with all that was stamped on them.

    Offsets count the merged generated tokens, over all segments and attempts. entry_version: the
    weights version under which the request entered its first engine.
    token_ids, policy_versions, context_kv_version_min: int32 [n]; context_kv_version_mean:
    float64 [n]; log_probs: float32 [n] and top_n if they were asked for.
    """

    offset: Count
    entry_version: Version
    token_ids: Tokens
    policy_versions: Versions
    context_kv_version_min: Versions
    context_kv_version_mean: Doubles
    log_probs: LogProbs | None = None
    top_n: TopNRun | None = None

    def __post_init__(self) -> None:
        values = [getattr(self, name) for name in _PER_TOKEN]
        values.append(None if self.top_n is None else self.top_n.counts)
        lengths = [len(value) for value in values if value is not None]
        if len(set(lengths)) != 1:
            raise ProtocolError(f"TokenRun: arrays of different lengths: {lengths}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The offset of the token after the last one."""
        return self.offset + len(self.token_ids)

    def from_offset(self, offset: int) -> TokenRun:
        """Return the tokens from `offset` on: without those a receiver has already.

        Raises ProtocolError if it starts only behind `offset`: tokens between are missing.
        """
        num_known = offset - self.offset
        if num_known < 0:
            raise ProtocolError(f"tokens [{offset}, {self.offset}) are missing")
        if num_known == 0:
            return self
        cut: dict[str, Any] = {}
        for name in _PER_TOKEN:
            values = getattr(self, name)
            cut[name] = None if values is None else values[num_known:]
        top_n = None if self.top_n is None else self.top_n.from_position(num_known)
        return dataclasses.replace(self, offset=offset, top_n=top_n, **cut)


def join_runs(runs: Sequence[TokenRun]) -> TokenRun:
    """Return one run of one or more that follow each other, under the first's entry version.

    Raises ProtocolError if one does not start where the one before ends, or only some have
    log-probs or top-n.
    """
    first = runs[0]
    for before, run in pairwise(runs):
        if run.offset != before.end:
            raise ProtocolError(f"a run from {run.offset} does not follow one up to {before.end}")
    joined = {name: _joined(name, [getattr(run, name) for run in runs]) for name in _PER_TOKEN}
    parts = [run.top_n for run in runs]
    top_n = None
    if any(part is not None for part in parts):
        names = ("counts", "token_ids", "log_probs")
        top_n = TopNRun(
            **{name: _joined(name, [getattr(part, name, None) for part in parts]) for name in names}
        )
    return dataclasses.replace(first, top_n=top_n, **joined)


def _joined(name: str, arrays: Sequence[npt.NDArray[Any] | None]) -> Any:
    """Return the arrays as one, None if all are None."""
    present = [array for array in arrays if array is not None]
    if present and len(present) != len(arrays):
        raise ProtocolError(f"only {len(present)} of {len(arrays)} runs have {name}")
    return np.concatenate(present) if present else None
