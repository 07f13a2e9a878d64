"""Generated tokens with their provenance: of one request, cut and joined by offset; of many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from rollout.coordinator.protocol.wire import (
    FLAGS,
    FLOAT32,
    FLOAT64,
    IDS,
    INT32,
    TOKEN_IDS,
    Count,
    Flags,
    Float32s,
    Float64s,
    Int32s,
    Int64s,
    Version,
    WireData,
    set_columns,
)
from rollout.errors import ProtocolError

_TOP_N_COLUMNS = {"counts": INT32, "token_ids": TOKEN_IDS, "log_probs": FLOAT32}
_COLUMNS = {
    "token_ids": TOKEN_IDS,
    "policy_versions": INT32,
    "context_kv_version_min": INT32,
    "context_kv_version_mean": FLOAT64,
    "log_probs": FLOAT32,
}


_OF_REQUESTS = {
    "request_ids": IDS,
    "attempts": IDS,
    "offsets": IDS,
    "counts": TOKEN_IDS,
    "entry_versions": INT32,
    "has_log_probs": FLAGS,
    "has_top_n": FLAGS,
}


class TopNRun(WireData, frozen=True, kw_only=True):
    """The most probable tokens at each of n positions, one after the other.

    counts: int32 [n], how many each position has, -1 where there is no value. token_ids: int32,
    log_probs: float32, both [sum of the counts].
    """

    counts: Int32s
    token_ids: Int32s
    log_probs: Float32s

    def __post_init__(self) -> None:
        set_columns(self, _TOP_N_COLUMNS)
        counts_n = self.counts.astype(np.int64)
        total = int(np.maximum(counts_n, 0).sum())
        if (counts_n < -1).any() or not total == len(self.token_ids) == len(self.log_probs):
            raise ProtocolError(
                f"TopNRun: {total} counted, {len(self.token_ids)} ids, "
                f"{len(self.log_probs)} log-probs"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[int, float] | None]) -> TopNRun:
        """Return the run of the documents' form: a dictionary, or None, per position."""
        filled = [row for row in rows if row is not None]
        return cls(
            counts=np.array([-1 if row is None else len(row) for row in rows], dtype=np.int32),
            token_ids=np.array([key for row in filled for key in row], dtype=np.int32),
            log_probs=np.array([row[key] for row in filled for key in row], dtype=np.float32),
        )

    def rows(self) -> list[dict[int, float] | None]:
        """Return the documents' form of it, in the same order."""
        pairs = zip(self.token_ids.tolist(), self.log_probs.tolist(), strict=True)
        return [
            None if count < 0 else dict(next(pairs) for _ in range(count))
            for count in self.counts.tolist()
        ]

    def positions(self, start: int, end: int | None = None) -> TopNRun:
        """Return positions [start, end), to the last one without an end."""
        counts_n = self.counts[start:end]
        first = int(np.maximum(self.counts[:start], 0).sum())
        last = first + int(np.maximum(counts_n, 0).sum())
        return TopNRun(
            counts=counts_n,
            token_ids=self.token_ids[first:last],
            log_probs=self.log_probs[first:last],
        )


class TokenRun(WireData, frozen=True, kw_only=True):
    """Generated tokens [offset, offset + n) of a request with all that was stamped on them.

    Offsets count the merged generated tokens, over all segments and attempts. entry_version: the
    weights version under which the request entered its first engine.
    token_ids, policy_versions, context_kv_version_min: int32 [n]; context_kv_version_mean:
    float64 [n]; log_probs: float32 [n] and top_n if they were asked for.
    """

    offset: Count
    entry_version: Version
    token_ids: Int32s
    policy_versions: Int32s
    context_kv_version_min: Int32s
    context_kv_version_mean: Float64s
    log_probs: Float32s | None = None
    top_n: TopNRun | None = None

    def __post_init__(self) -> None:
        set_columns(self, _COLUMNS)
        num_tokens = len(self.token_ids)
        if not (
            len(self.policy_versions) == len(self.context_kv_version_min) == num_tokens
            and len(self.context_kv_version_mean) == num_tokens
            and (self.log_probs is None or len(self.log_probs) == num_tokens)
            and (self.top_n is None or len(self.top_n.counts) == num_tokens)
        ):
            raise ProtocolError(f"TokenRun: arrays of different lengths, {num_tokens} token ids")

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
        for name in _COLUMNS:
            values = getattr(self, name)
            cut[name] = None if values is None else values[num_known:]
        top_n = None if self.top_n is None else self.top_n.positions(num_known)
        return replace(self, offset=offset, top_n=top_n, **cut)


class TokenRuns(WireData, frozen=True, kw_only=True):
    """A TokenRun of each of R attempts, one after the other: T tokens in one set of columns.

    request_ids, attempts, offsets: int64 [R]; counts: int32 [R], how many tokens each has;
    entry_versions: int32 [R]. log_probs: float32, and top_n, of those that has_log_probs and
    has_top_n, uint8 [R], say have them. The others as in TokenRun, [T].
    """

    request_ids: Int64s
    attempts: Int64s
    offsets: Int64s
    counts: Int32s
    entry_versions: Int32s
    token_ids: Int32s
    policy_versions: Int32s
    context_kv_version_min: Int32s
    context_kv_version_mean: Float64s
    has_log_probs: Flags
    log_probs: Float32s
    has_top_n: Flags
    top_n: TopNRun | None = None

    def __post_init__(self) -> None:
        set_columns(self, _OF_REQUESTS)
        set_columns(self, _COLUMNS)
        num_requests = len(self.request_ids)
        if any(len(getattr(self, name)) != num_requests for name in _OF_REQUESTS):
            raise ProtocolError(f"TokenRuns: columns of other lengths than {num_requests} requests")
        num_tokens, num_log_probs, num_top_n = (
            int(self.counts.sum(dtype=np.int64)),
            int(self.counts[self.has_log_probs != 0].sum(dtype=np.int64)),
            int(self.counts[self.has_top_n != 0].sum(dtype=np.int64)),
        )
        if not (
            len(self.token_ids) == len(self.policy_versions) == num_tokens
            and len(self.context_kv_version_min) == len(self.context_kv_version_mean) == num_tokens
            and len(self.log_probs) == num_log_probs
            and (0 if self.top_n is None else len(self.top_n.counts)) == num_top_n
        ):
            raise ProtocolError(f"TokenRuns: columns of other lengths than {num_tokens} tokens")

    def __len__(self) -> int:
        return len(self.request_ids)

    def apart(self) -> Iterator[tuple[int, int, TokenRun]]:
        """Yield (request id, attempt, its run); the arrays are views."""
        rows = zip(*(getattr(self, name).tolist() for name in _OF_REQUESTS), strict=True)
        start = start_log_probs = start_top_n = 0
        for request_id, attempt, offset, count, entry_version, has_log_probs, has_top_n in rows:
            end, log_probs, top_n = start + count, None, None
            if has_log_probs:
                log_probs = self.log_probs[start_log_probs : start_log_probs + count]
                start_log_probs += count
            if has_top_n and self.top_n is not None:
                top_n = self.top_n.positions(start_top_n, start_top_n + count)
                start_top_n += count
            run = TokenRun(
                offset=offset,
                entry_version=entry_version,
                token_ids=self.token_ids[start:end],
                policy_versions=self.policy_versions[start:end],
                context_kv_version_min=self.context_kv_version_min[start:end],
                context_kv_version_mean=self.context_kv_version_mean[start:end],
                log_probs=log_probs,
                top_n=top_n,
            )
            start = end
            yield request_id, attempt, run


def join_runs(runs: Sequence[TokenRun]) -> TokenRun:
    """Return one run of one or more that follow each other, under the first's entry version.

    Raises ProtocolError if one does not start where the one before ends, or only some have
    log-probs or top-n.
    """
    for before, run in pairwise(runs):
        if run.offset != before.end:
            raise ProtocolError(f"a run from {run.offset} does not follow one up to {before.end}")
    joined = {name: _joined(name, [getattr(run, name) for run in runs]) for name in _COLUMNS}
    parts = [run.top_n for run in runs]
    top_n = None
    if any(part is not None for part in parts):
        top_n = TopNRun(
            **{
                name: _joined(name, [getattr(part, name, None) for part in parts])
                for name in _TOP_N_COLUMNS
            }
        )
    return replace(runs[0], top_n=top_n, **joined)


def _joined(name: str, arrays: Sequence[npt.NDArray[Any] | None]) -> Any:
    """Return the arrays as one, None if all are None."""
    present = [array for array in arrays if array is not None]
    if present and len(present) != len(arrays):
        raise ProtocolError(f"only {len(present)} of {len(arrays)} runs have {name}")
    return np.concatenate(present) if present else None
