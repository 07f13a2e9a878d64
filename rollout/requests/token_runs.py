"""Generated tokens with their provenance: runs of one request by offset, and of many requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from rollout.errors import ProtocolError
from rollout.wire import (
    Count,
    Flags,
    Float32s,
    Float64s,
    Ids,
    Int32s,
    TokenIds,
    Version,
    WithColumns,
    columns_of,
)

R = TypeVar("R", "TopNRun", "TokenRun")


class TopNRun(WithColumns, frozen=True, kw_only=True):
    """The most probable tokens at each of n positions, in one set of arrays.

    counts: int32 [n], tokens per position, -1 where the document has None. token_ids: int32,
    log_probs: float32, both [sum of the counts].
    """

    counts: Int32s
    token_ids: TokenIds
    log_probs: Float32s

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self._num_tokens_before(len(self.counts))
        is_legal = not (self.counts < -1).any()
        if not is_legal or not total == len(self.token_ids) == len(self.log_probs):
            raise ProtocolError(
                f"TopNRun: {total} counted, {len(self.token_ids)} ids, "
                f"{len(self.log_probs)} log-probs"
            )

    def _num_tokens_before(self, position: int) -> int:
        return int(np.maximum(self.counts[:position], 0).sum(dtype=np.int64))

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[int, float] | None]) -> TopNRun:
        """Return the run of dictionaries {token id: log-prob}, one or None per position."""
        filled = [row for row in rows if row is not None]
        return cls(
            counts=np.array([-1 if row is None else len(row) for row in rows], dtype=np.int32),
            token_ids=np.array([key for row in filled for key in row], dtype=np.int32),
            log_probs=np.array([row[key] for row in filled for key in row], dtype=np.float32),
        )

    def rows(self) -> list[dict[int, float] | None]:
        """Return the dictionaries {token id: log-prob}, one or None per position."""
        pairs = zip(self.token_ids.tolist(), self.log_probs.tolist(), strict=True)
        return [
            None if count < 0 else dict(next(pairs) for _ in range(count))
            for count in self.counts.tolist()
        ]

    def positions(self, start: int, end: int | None = None) -> TopNRun:
        """Return the run of the positions [start, end); to the last one if `end` is None."""
        counts_n = self.counts[start:end]
        first, last = map(self._num_tokens_before, (start, start + len(counts_n)))
        return TopNRun(
            counts=counts_n,
            token_ids=self.token_ids[first:last],
            log_probs=self.log_probs[first:last],
        )


class TokenRun(WithColumns, frozen=True, kw_only=True):
    """Generated tokens [offset, offset + n) of a request with their provenance.

    Offsets count the merged generated tokens, over all segments and attempts. entry_version: the
    weights version under which the request entered its first engine.
    token_ids, policy_versions, context_kv_version_min: int32 [n]; context_kv_version_mean:
    float64 [n]; log_probs: float32 [n], ranks: int32 [n] and top_n if they were asked for.
    """

    offset: Count
    entry_version: Version
    token_ids: TokenIds
    policy_versions: Int32s
    context_kv_version_min: Int32s
    context_kv_version_mean: Float64s
    log_probs: Float32s | None = None
    ranks: TokenIds | None = None
    top_n: TopNRun | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = [len(getattr(self, name)) for name in _PER_TOKEN]
        lengths += [len(column) for column in (self.log_probs, self.ranks) if column is not None]
        lengths += [] if self.top_n is None else [len(self.top_n.counts)]
        if lengths.count(lengths[0]) != len(lengths):
            raise ProtocolError(f"TokenRun: arrays of different lengths, {lengths[0]} token ids")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The offset of the token after the last one."""
        return self.offset + len(self.token_ids)

    def from_offset(self, offset: int) -> TokenRun:
        """Return the tokens from `offset` on.

        Raises ProtocolError if the run starts after `offset`: tokens between are missing.
        """
        num_known = offset - self.offset
        if num_known < 0:
            raise ProtocolError(f"tokens [{offset}, {self.offset}) are missing")
        if num_known == 0:
            return self
        return replace(
            self,
            **{name: getattr(self, name)[num_known:] for name in _PER_TOKEN},
            offset=offset,
            log_probs=None if self.log_probs is None else self.log_probs[num_known:],
            ranks=None if self.ranks is None else self.ranks[num_known:],
            top_n=None if self.top_n is None else self.top_n.positions(num_known),
        )


# Every run has these; log_probs, ranks and top_n only if they were requested.
_PER_TOKEN = ("token_ids", "policy_versions", "context_kv_version_min", "context_kv_version_mean")


class TokenRuns(WithColumns, frozen=True, kw_only=True):
    """The TokenRuns of R attempts with T tokens together, in one set of columns.

    request_ids, attempts, offsets: int64 [R]; counts: int32 [R], how many tokens each has;
    entry_versions: int32 [R]. has_log_probs, has_ranks, has_top_n: uint8 [R], which attempts have
    log_probs (float32), ranks (int32) and top_n. The others are as in TokenRun, [T].
    """

    request_ids: Ids
    attempts: Ids
    offsets: Ids
    counts: TokenIds
    entry_versions: Int32s
    token_ids: TokenIds
    policy_versions: Int32s
    context_kv_version_min: Int32s
    context_kv_version_mean: Float64s
    has_log_probs: Flags
    log_probs: Float32s
    has_ranks: Flags
    ranks: TokenIds
    has_top_n: Flags
    top_n: TopNRun | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        num_requests = len(self.request_ids)
        if any(len(getattr(self, name)) != num_requests for name in _PER_REQUEST):
            raise ProtocolError(f"TokenRuns: columns of other lengths than {num_requests} requests")
        num_tokens, num_log_probs, num_ranks, num_top_n = self._num_before(num_requests)
        if not (
            all(len(getattr(self, name)) == num_tokens for name in _PER_TOKEN)
            and len(self.log_probs) == num_log_probs
            and len(self.ranks) == num_ranks
            and (0 if self.top_n is None else len(self.top_n.counts)) == num_top_n
        ):
            raise ProtocolError(f"TokenRuns: columns of other lengths than {num_tokens} tokens")

    def __len__(self) -> int:
        return len(self.request_ids)

    def _num_before(self, row: int) -> tuple[int, int, int, int]:
        """Return the numbers of tokens, log-probs, ranks and top-n positions of the attempts before
        `row`."""
        counts = self.counts[:row]
        return (
            int(counts.sum(dtype=np.int64)),
            int(counts[self.has_log_probs[:row] != 0].sum(dtype=np.int64)),
            int(counts[self.has_ranks[:row] != 0].sum(dtype=np.int64)),
            int(counts[self.has_top_n[:row] != 0].sum(dtype=np.int64)),
        )

    def rows(self, start: int, end: int) -> TokenRuns:
        """Return the runs of the attempts [start, end); the arrays are views."""
        tokens, log_probs, ranks, top_n = map(slice, self._num_before(start), self._num_before(end))
        cut: dict[str, Any] = {
            **{name: getattr(self, name)[start:end] for name in _PER_REQUEST},
            **{name: getattr(self, name)[tokens] for name in _PER_TOKEN},
        }
        if self.top_n is not None:
            cut["top_n"] = self.top_n.positions(top_n.start, top_n.stop)
        return replace(self, log_probs=self.log_probs[log_probs], ranks=self.ranks[ranks], **cut)

    def apart(self) -> Iterator[tuple[int, int, TokenRun]]:
        """Yield (request id, attempt, its run); the arrays are views."""
        rows = zip(*(getattr(self, name).tolist() for name in _PER_REQUEST), strict=True)
        columns = {name: getattr(self, name) for name in _PER_TOKEN}
        start = start_log_probs = start_ranks = start_top_n = 0
        for request_id, attempt, offset, count, entry_version, *has in rows:
            has_log_probs, has_ranks, has_top_n = has
            end, log_probs, ranks, top_n = start + count, None, None, None
            if has_log_probs:
                log_probs = self.log_probs[start_log_probs : start_log_probs + count]
                start_log_probs += count
            if has_ranks:
                ranks = self.ranks[start_ranks : start_ranks + count]
                start_ranks += count
            if has_top_n and self.top_n is not None:
                top_n = self.top_n.positions(start_top_n, start_top_n + count)
                start_top_n += count
            run = TokenRun(
                offset=offset,
                entry_version=entry_version,
                **{name: column[start:end] for name, column in columns.items()},
                log_probs=log_probs,
                ranks=ranks,
                top_n=top_n,
            )
            start = end
            yield request_id, attempt, run


_PER_REQUEST = (
    *("request_ids", "attempts", "offsets", "counts", "entry_versions"),
    *("has_log_probs", "has_ranks", "has_top_n"),
)


def join_runs(runs: Sequence[TokenRun]) -> TokenRun:
    """Return consecutive runs as one, with the entry version of the first.

    Raises ProtocolError if one does not start where the one before ends, or only some have
    log-probs, ranks or top-n.
    """
    for before, run in pairwise(runs):
        if run.offset != before.end:
            raise ProtocolError(f"a run from {run.offset} does not follow one up to {before.end}")
    top_n = [run.top_n for run in runs if run.top_n is not None]
    joined_top_n = replace(top_n[0], **_joined(top_n)) if len(top_n) == len(runs) else None
    if top_n and joined_top_n is None:
        raise ProtocolError(f"only {len(top_n)} of {len(runs)} runs have top_n")
    return replace(runs[0], top_n=joined_top_n, **_joined(runs))


def _joined(runs: Sequence[R]) -> dict[str, npt.NDArray[Any] | None]:
    """Return each column of the runs joined; None where all runs have None."""
    joined: dict[str, npt.NDArray[Any] | None] = {}
    for name in columns_of(type(runs[0])):
        present = [part for run in runs if (part := getattr(run, name)) is not None]
        if present and len(present) != len(runs):
            raise ProtocolError(f"only {len(present)} of {len(runs)} runs have {name}")
        joined[name] = np.concatenate(present) if present else None
    return joined
