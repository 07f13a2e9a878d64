"""Newly generated tokens and their weights versions: TokenRun of one request, TokenRuns of many.

OutputProcessor creates them. `rollout.apis`, `rollout.coordinator` and `rollout.serve` send, cut
and join them. An attempt is one try to run a request. If the engine fails, the next attempt
continues on another engine. A request has log-probs, ranks and top-n (REQUESTED_COLUMNS of
rollout.requests.columns) only if it asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from rollout.errors import ProtocolError
from rollout.requests.columns import REQUESTED_COLUMNS, TOKEN_COLUMNS
from rollout.sampling_params import SamplingParams
from rollout.version_spans import VersionSpans
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

if TYPE_CHECKING:  # these modules import torch, which a coordinator does not load
    from rollout.requests.dynamic_request import DynamicInferenceRequest
    from rollout.requests.record import DynamicInferenceRequestRecord


class TopNRun(WithColumns, frozen=True, kw_only=True):
    """The most probable tokens at each of n positions, in one set of arrays.

    counts: int32 [n], the number of tokens per position; -1 where the request has None.
    token_ids: int32 [sum of the counts].
    log_probs: float32 [sum of the counts].
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

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, part: slice) -> TopNRun:
        """Return the positions in a slice without a step."""
        start, end, _ = part.indices(len(self))
        first, last = self._num_tokens_before(start), self._num_tokens_before(end)
        return TopNRun(
            counts=self.counts[start:end],
            token_ids=self.token_ids[first:last],
            log_probs=self.log_probs[first:last],
        )

    def _num_tokens_before(self, position: int) -> int:
        return int(np.maximum(self.counts[:position], 0).sum(dtype=np.int64))

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[int, float] | None]) -> TopNRun:
        """Create a run from one dictionary {token id: log-prob}, or None, per position."""
        filled = [row for row in rows if row is not None]
        return cls(
            counts=np.array([-1 if row is None else len(row) for row in rows], dtype=np.int32),
            token_ids=np.array([key for row in filled for key in row], dtype=np.int32),
            log_probs=np.array([row[key] for row in filled for key in row], dtype=np.float32),
        )

    def rows(self) -> list[dict[int, float] | None]:
        """Return one dictionary {token id: log-prob}, or None, per position."""
        pairs = zip(self.token_ids.tolist(), self.log_probs.tolist(), strict=True)
        return [
            None if count < 0 else dict(next(pairs) for _ in range(count))
            for count in self.counts.tolist()
        ]


class TokenRun(WithColumns, frozen=True, kw_only=True):
    """Generated tokens [offset, offset + n) of a request, with their weights versions.

    offset: index of the first token among the generated tokens of all segments and attempts.
    entry_version: the weights version under which the request entered its first engine.
    token_ids, policy_versions, context_kv_version_min, ranks: int32 [n].
    context_kv_version_mean: float64 [n].
    log_probs: float32 [n].

    `log_probs`, `ranks` and `top_n` are None unless the request asked for them.
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

    @classmethod
    def of(cls, record: DynamicInferenceRequestRecord, offset: int) -> TokenRun | None:
        """Return the generated tokens of `record` from `offset` on; None if there are none. The
        cost depends only on the number of returned tokens."""
        tails = _tails(record, offset)
        if not tails:
            return None
        first, last = len(record[0].prompt_tokens) + offset, record.current.num_tokens
        contexts = [segment.context_kv_versions(start) for segment, start in tails]
        token_ids = [np.asarray(s.column("generated_tokens")[i:], np.int32) for s, i in tails]
        requested: dict[str, Any] = {}
        for column in REQUESTED_COLUMNS:
            values = record.values_from(column, offset)
            if values is not None:
                is_array = bool(column.typecode)
                new = np.array(values, column.typecode) if is_array else TopNRun.from_rows(values)
                requested[column.run_field] = new
        return cls(
            offset=offset,
            entry_version=record[0].weights_version,
            token_ids=np.concatenate(token_ids),
            policy_versions=record.current.stamped_policy_spans().slice(first, last).to_array(),
            context_kv_version_min=np.concatenate([oldest for oldest, _ in contexts]),
            context_kv_version_mean=np.concatenate([mean for _, mean in contexts]),
            **requested,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        num_tokens = len(self.token_ids)
        for name in (*_PER_TOKEN, *_REQUESTED):
            column = getattr(self, name)
            if column is not None and len(column) != num_tokens:
                raise ProtocolError(f"TokenRun: {len(column)} {name} for {num_tokens} token ids")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The offset after the last token."""
        return self.offset + len(self.token_ids)

    def from_offset(self, offset: int) -> TokenRun:
        """Return the tokens from `offset` on. Raises ProtocolError if the run starts after
        `offset`."""
        num_known = offset - self.offset
        if num_known < 0:
            raise ProtocolError(f"tokens [{offset}, {self.offset}) are missing")
        if num_known == 0:
            return self
        columns = {name: getattr(self, name) for name in (*_PER_TOKEN, *_REQUESTED)}
        rest = {name: None if own is None else own[num_known:] for name, own in columns.items()}
        return replace(self, offset=offset, **rest)

    def request_fields(self, params: SamplingParams) -> dict[str, Any]:
        """Return the tokens as fields of a new DynamicInferenceRequest that continues after them.
        Values that a run lacks, such as the tokens' times, are placeholders."""
        fields: dict[str, Any] = {}
        for column in TOKEN_COLUMNS:
            if not column.run_field:
                fields[column.field] = np.full(len(self), column.placeholder[0], column.typecode)
            elif column.is_wanted(params):
                values = getattr(self, column.run_field)
                fields[column.field] = values.rows() if isinstance(values, TopNRun) else values
        return fields

    def policy_spans(self, num_prompt_tokens: int) -> VersionSpans:
        """Return the policy versions of a prompt of this length and, after it, of the tokens."""
        spans = VersionSpans([(num_prompt_tokens, self.entry_version)])
        for version in self.policy_versions.tolist():
            spans.append(1, version)
        return spans


def _tails(
    record: DynamicInferenceRequestRecord, offset: int
) -> list[tuple[DynamicInferenceRequest, int]]:
    """Return the segments with generated tokens from `offset` on, each with the index of its first
    such token."""
    tails = []
    for segment in record.requests:
        num_generated = segment.num_generated_tokens
        if offset < num_generated:
            tails.append((segment, max(offset, 0)))
        offset -= num_generated
    return tails


_REQUESTED = tuple(column.run_field for column in REQUESTED_COLUMNS)
_PER_TOKEN = tuple(name for name in columns_of(TokenRun) if name not in _REQUESTED)


class TokenRuns(WithColumns, frozen=True, kw_only=True):
    """Runs of R attempts, with T tokens in total, in one set of columns.

    request_ids, attempts, offsets: int64 [R].
    counts: int32 [R], the number of tokens of each attempt.
    entry_versions: int32 [R].
    has_log_probs, has_ranks, has_top_n: uint8 [R], 1 for attempts whose tokens have values in
        `log_probs`, `ranks` and `top_n`.
    log_probs, ranks, top_n: values of the attempts whose flag is 1.

    The other columns are those of TokenRun, [T].
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
            raise ProtocolError(
                f"TokenRuns: a column has another length than the {num_requests} requests"
            )
        for name, num_tokens in self._num_before(num_requests).items():
            column = getattr(self, name)
            if num_tokens != (0 if column is None else len(column)):
                raise ProtocolError(f"TokenRuns: {name} needs {num_tokens} values")

    def __len__(self) -> int:
        return len(self.request_ids)

    def _num_before(self, row: int) -> dict[str, int]:
        """Return, for each column, the number of values of the attempts before `row`."""
        counts = self.counts[:row]
        numbers = dict.fromkeys(_PER_TOKEN, int(counts.sum(dtype=np.int64)))
        for name in _REQUESTED:
            has_values = getattr(self, f"has_{name}")[:row] != 0
            numbers[name] = int(counts[has_values].sum(dtype=np.int64))
        return numbers

    def rows(self, start: int, end: int) -> TokenRuns:
        """Return the runs of the attempts [start, end). The arrays are views."""
        cut: dict[str, Any] = {name: getattr(self, name)[start:end] for name in _PER_REQUEST}
        before, after = self._num_before(start), self._num_before(end)
        for name, first in before.items():
            column = getattr(self, name)
            cut[name] = None if column is None else column[first : after[name]]
        return replace(self, **cut)

    def apart(self) -> Iterator[tuple[int, int, TokenRun]]:
        """Yield (request id, attempt, run) for each attempt. The arrays are views."""
        rows = zip(*(getattr(self, name).tolist() for name in _PER_REQUEST), strict=True)
        columns = [(name, getattr(self, name)) for name in _PER_TOKEN]
        requested = [(name, getattr(self, name)) for name in _REQUESTED]
        start, starts = 0, dict.fromkeys(_REQUESTED, 0)
        for request_id, attempt, offset, count, entry_version, *flags in rows:
            end = start + count
            own = {name: column[start:end] for name, column in columns}
            for (name, column), has_values in zip(requested, flags, strict=True):
                if has_values and column is not None:
                    own[name] = column[starts[name] : starts[name] + count]
                    starts[name] += count
            yield request_id, attempt, TokenRun(offset=offset, entry_version=entry_version, **own)
            start = end

    def with_attempts(self, attempts: Sequence[int]) -> TokenRuns:
        """Return the same runs with these attempt numbers, one per request."""
        return replace(self, attempts=np.array(attempts, np.int64))


_PER_REQUEST = (
    *("request_ids", "attempts", "offsets", "counts", "entry_versions"),
    *(f"has_{name}" for name in _REQUESTED),
)


def join_runs(runs: Sequence[TokenRun]) -> TokenRun:
    """Join consecutive runs into one, which has the entry version of the first run. Raises
    ProtocolError if a run does not start where the previous run ends, or if only some runs have
    log-probs, ranks or top-n."""
    for before, run in pairwise(runs):
        if run.offset != before.end:
            raise ProtocolError(f"a run from {run.offset} does not follow one up to {before.end}")
    return replace(runs[0], **_joined(runs, (*_PER_TOKEN, *_REQUESTED)))


def _joined(
    runs: Sequence[TokenRun] | Sequence[TopNRun], names: Sequence[str]
) -> dict[str, npt.NDArray[Any] | TopNRun | None]:
    """Return each column of the runs joined; None if no run has the column."""
    joined: dict[str, npt.NDArray[Any] | TopNRun | None] = {}
    for name in names:
        present = [part for run in runs if (part := getattr(run, name)) is not None]
        if present and len(present) != len(runs):
            raise ProtocolError(f"only {len(present)} of {len(runs)} runs have {name}")
        if present and isinstance(present[0], TopNRun):
            joined[name] = replace(present[0], **_joined(present, [*columns_of(TopNRun)]))
        else:
            joined[name] = np.concatenate(present) if present else None
    return joined
