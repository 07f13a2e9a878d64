"""OutputProcessor: keeps the records of an engine's requests and writes step outputs into them.

`rollout.engine.build` and `rollout_vllm.engine` create it. Engine adds records and returns ended
records to its caller. Step pipelines write the scheduler's decisions and the sampled tokens.
Suspension marks requests as queued again. `rollout.engine.input_processor` uses
`needs_prompt_scores`.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.blocks.routing_record import RoutingRecord
from rollout.engine.counters import RequestTotals
from rollout.errors import EngineStateError
from rollout.requests.columns import REQUESTED_COLUMNS, TOKEN_COLUMNS
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord, segment_of_prompt
from rollout.requests.request import Status
from rollout.requests.token_runs import TokenRun, TokenRuns, TopNRun
from rollout.sampling_params import SamplingParams
from rollout.scheduling.output import FinishedRequest, ScoredPrompt, StepUpdate
from rollout.step.output import SampleResult, ScoreResult, StepOutput
from rollout.version_spans import VersionSpans


@dataclass(slots=True, eq=False)
class RequestState:
    """The record of an unfinished request, and direct references to its growing values.

    The values of the current segment are arrays, which take 4 bytes per token.

    entry_time: time of entry into the first engine, by time.monotonic.
    num_unscored: the number of tokens at entry if this engine scores the prompt, else None.
    last_token_time: time of the newest token sampled here, by time.monotonic; None before the first
        token.
    num_prompt: number of tokens in the current segment's prompt.
    num_before: how many of the `num_prompt` tokens were generated in earlier segments.
    policy_spans, token_ids, tpot: columns of the current segment, which grow in place.
    requested: the segment's REQUESTED_COLUMNS by `run_field`, without columns that were not
        requested.
    has_requested: for each of REQUESTED_COLUMNS, whether it was requested.
    """

    record: DynamicInferenceRequestRecord
    entry_time: float
    num_unscored: int | None = None
    last_token_time: float | None = None
    segment: DynamicInferenceRequest = field(init=False)
    num_prompt: int = field(init=False)
    num_before: int = field(init=False)
    policy_spans: VersionSpans = field(init=False)
    token_ids: array[int] = field(init=False)
    tpot: array[float] | None = field(init=False)
    requested: dict[str, Any] = field(init=False)
    has_requested: tuple[bool, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.begin_segment()

    def begin_segment(self) -> None:
        """Put empty arrays into the current segment, which has no generated tokens yet."""
        segment: Any = self.record.current  # declared with lists, which other code sees
        self.segment, self.num_prompt = segment, len(segment.prompt_tokens)
        self.num_before = self.num_prompt - len(self.record[0].prompt_tokens)
        self.policy_spans = segment.policy_spans
        kept = [c for c in TOKEN_COLUMNS if getattr(segment, c.field) is not None]
        for column in kept:
            setattr(segment, column.field, column.new())
        self.token_ids = segment.generated_tokens
        self.tpot = segment.tpot
        self.requested = {c.run_field: getattr(segment, c.field) for c in kept if c.wanted_by}
        self.has_requested = tuple(column in kept for column in REQUESTED_COLUMNS)


class OutputProcessor:
    """Keeps one record per request. The record of an ended request is returned once and then
    dropped. The record of an unfinished request is incomplete, so only copies of it leave this
    object."""

    def __init__(
        self,
        *,
        track_paused: bool,
        track_generated_tokens: bool,
        totals: RequestTotals,
        routing: RoutingRecord | None = None,
    ) -> None:
        """`routing` is the record of the tokens' experts; None if experts are not recorded."""
        self._totals, self._routing = totals, routing
        self._last_tokens_at = 0.0  # by time.monotonic
        self._track_paused = track_paused
        self._track_generated_tokens = track_generated_tokens
        self._unfinished: dict[int, RequestState] = {}  # queued requests included
        self._ended: dict[int, DynamicInferenceRequestRecord] = {}  # in the order of their ends

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._unfinished or request_id in self._ended

    def __len__(self) -> int:
        return len(self._unfinished) + len(self._ended)

    def request_ids(self) -> list[int]:
        """Return the ids of all requests, unfinished ones first."""
        return [*self._unfinished, *self._ended]

    def unfinished_ids(self) -> Collection[int]:
        return self._unfinished.keys()

    def violations(self) -> list[str]:
        """Return the violated invariants of the unfinished records, one sentence each."""
        found = []
        for request_id, state in self._unfinished.items():
            num_tokens, num_versions = len(state.token_ids), len(state.policy_spans)
            if num_versions != state.num_prompt + num_tokens:
                found.append(
                    f"request {request_id} has {state.num_prompt} prompt tokens, {num_tokens} "
                    f"generated ones, and {num_versions} policy versions"
                )
            columns = [*state.requested.values()] + ([] if state.tpot is None else [state.tpot])
            if any(len(column) != num_tokens for column in columns):
                found.append(f"request {request_id} has columns of another length than its tokens")
        if both := sorted(self._unfinished.keys() & self._ended.keys()):
            found.append(f"requests {both} have ended and have not")
        return found

    # ---- adding and returning

    def add_request(self, record: DynamicInferenceRequestRecord) -> None:
        """Add the record of a queued request, which is new or was begun by another engine. A
        request from another engine keeps the time of its first arrival. Its KV is computed again.
        """
        segment, is_scored = record.current, needs_prompt_scores(record)
        num_unscored = len(segment.prompt_tokens) if is_scored else None
        _queue_without_kv(record, num_unscored)
        segment.event_add_engine = record.entry_event() or segment.add_event_add_engine()
        if len(record.requests) == 1:
            segment.arrival_time = segment.event_add_engine.timestamp
        # Events have wall time, and the clock of the engine that wrote it may be ahead of ours.
        seconds_ago = max(0.0, time.time() - segment.event_add_engine.timestamp)
        entry_time = time.monotonic() - seconds_ago
        self._unfinished[record.request_id] = RequestState(record, entry_time, num_unscored)

    def has_ended(self, request_id: int) -> bool:
        """Return whether the request has ended and its record was not returned yet. Raises
        EngineStateError for a request that is not in the engine."""
        if request_id not in self:
            raise EngineStateError(
                f"request {request_id} is not in the engine: it was never added, or its record was "
                "returned when it finished"
            )
        return request_id in self._ended

    def ended(self, request_ids: Iterable[int]) -> list[DynamicInferenceRequestRecord]:
        """Return the records of ended requests. They stay here until `drop_ended`."""
        return [self._ended[request_id] for request_id in request_ids]

    def drop_ended(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            del self._ended[request_id]

    def keep_ended(self, records: Iterable[DynamicInferenceRequestRecord]) -> None:
        """Put back records that `ended` returned but that did not reach the engine's caller."""
        self._ended.update({record.request_id: record for record in records})

    def ended_ids(self) -> list[int]:
        """Return the ids of all ended requests, oldest end first."""
        return list(self._ended)

    def copy_of(
        self,
        request_id: int,
        kv_spans: VersionSpans | None,
        version: int,
        routing: NDArray[np.int16] | None = None,
    ) -> DynamicInferenceRequestRecord:
        """Return a copy of the record as it is now. Its staleness is counted from weights
        `version`. `kv_spans` are the versions that wrote the KV of an unfinished request; None for
        an ended request. `routing` are the experts of an unfinished request's tokens."""
        if kv_spans is None:
            return self._ended[request_id].copy()
        copied = self._unfinished[request_id].record.copy()
        copied.current.kv_spans = kv_spans
        copied.current.routing_indices = _as_tensor(routing)
        copied.observe_version(version)
        return copied

    def new_tokens(self, wanted: Iterable[tuple[int, int]]) -> TokenRuns:
        """Return the newest tokens of each wanted request. `attempts` of the result is all 0.
        `wanted` has (request id, offset) pairs; tokens from the offset on are returned. Requests
        that have ended, or have no such tokens, are left out."""
        # Hundreds of requests with one new token each are read in every step. So the values that
        # all new tokens of a request share are gathered once, and NumPy repeats them per token.
        # `others` are requests whose new tokens have several versions, which are written at the
        # end: the weights have changed, or the request was queued again.
        rows: list[int] = []
        token_ids = array("i")
        requested = {column.run_field: column.new() for column in REQUESTED_COLUMNS}
        others: list[tuple[int, TokenRun]] = []  # (index of the first token, run)
        for request_id, offset in wanted:
            state = self._unfinished.get(request_id)
            if state is None or offset - state.num_before >= len(state.token_ids):
                continue
            start = offset - state.num_before
            first = state.num_prompt + start  # length of the first token's context
            policy_start, policy_version, _, _ = state.policy_spans.last_run
            kv_run = state.segment.kv_spans.last_run
            if start >= 0 and policy_start <= first and kv_run[0] < first:
                count, has_values = len(state.token_ids) - start, state.has_requested
                token_ids.extend(state.token_ids[start:])
                for name, values in state.requested.items():
                    requested[name].extend(values[start:])
            else:
                run = TokenRun.of(state.record, offset)
                assert run is not None
                others.append((len(token_ids), run))
                count, own = len(run), _requested_of(run)
                has_values = tuple(map(own.__contains__, requested))
                token_ids.extend(run.token_ids)
                for name, values in own.items():
                    requested[name].extend(values)
            rows += (request_id, offset, count, state.record[0].weights_version)
            rows += (first, policy_version, *kv_run, *has_values)
        runs = _runs_of(rows, token_ids, requested)
        for start, run in others:
            at = slice(start, start + len(run))
            runs.policy_versions[at] = run.policy_versions
            runs.context_kv_version_min[at] = run.context_kv_version_min
            runs.context_kv_version_mean[at] = run.context_kv_version_mean
        return runs

    # ---- the scheduler's decisions

    def set_running(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            segment = self._unfinished[request_id].segment
            segment.status = Status.ACTIVE_AND_GENERATING_TOKENS

    def set_paused(self, request_ids: Iterable[int]) -> None:
        """Mark requests as paused, because free blocks ran out."""
        for request_id in request_ids:
            segment = self._unfinished[request_id].segment
            segment.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
            if self._track_paused:
                segment.add_event_pause()

    def requeue(self, request_ids: Iterable[int], *, is_preempted: bool = False) -> None:
        """Mark requests without KV as queued. Each gets a new segment, whose prompt is all its
        tokens so far.

        A request that was not preempted keeps its current segment if that segment has no generated
        token. Experts recorded for a segment without generated tokens are dropped. Only preemption
        adds an EVICT event.
        """
        for request_id in request_ids:
            state = self._unfinished[request_id]
            routing = self._take_routing(request_id)
            if len(state.token_ids):
                state.segment.routing_indices = routing
            if is_preempted or len(state.token_ids):
                state.record.checkpoint()
                state.begin_segment()
            _queue_without_kv(state.record, state.num_unscored)
            if is_preempted:
                state.segment.add_event_evict()

    def add_transient_error(self, request_ids: Iterable[int], error: Exception) -> None:
        for request_id in request_ids:
            self._unfinished[request_id].segment.add_event_error_transient(error)

    # ---- a step's output

    def process_outputs(self, update: StepUpdate, output: StepOutput) -> None:
        """Write the results of a step into the records, and end the requests that it finished."""
        now = time.monotonic()
        samples = output.samples
        for scored in update.scored:
            assert output.scores is not None
            self._append_prompt_scores(scored, output.scores)
        for prefilled in update.prefilled:
            segment = self._unfinished[prefilled.request_id].segment
            segment.finished_chunk_token_count = prefilled.num_tokens
            segment.num_cached_tokens = prefilled.num_cached_tokens
            segment.kv_spans = prefilled.kv_spans
            if prefilled.num_tokens == len(segment.prompt_tokens):
                segment.add_event_add_context()
        self._append_tokens(update, now)
        self._append_requested(update, samples)
        if self._track_generated_tokens:
            for request_id, token_id in zip(update.request_ids, update.token_ids, strict=True):
                self._unfinished[request_id].segment.add_event_generated_token(token_id)
        for finished in update.finished:
            self._finish(finished, update.weights_version, now)

    def _append_tokens(self, update: StepUpdate, now: float) -> None:
        # The loop runs 1,000 times in a step of 1,000 rows: nothing is looked up or called twice.
        unfinished, version = self._unfinished, update.weights_version
        totals, previous, num_after_previous = self._totals, self._last_tokens_at, 0
        for request_id, token_id in zip(update.request_ids, update.token_ids, strict=True):
            state = unfinished[request_id]
            state.token_ids.append(token_id)
            state.policy_spans.append(1, version)
            before = state.last_token_time
            if before is None:
                before = state.entry_time
                state.segment.ttft = now - before
                if not state.num_before:  # else another engine has sampled the first token
                    totals.add_first_token(state.num_prompt, now - before)
            elif before == previous:
                num_after_previous += 1
            else:
                totals.token.add(now - before)
            state.last_token_time = now
            if state.tpot is not None:
                state.tpot.append(now - before)
        totals.token.add(now - previous, num_after_previous)
        totals.num_generated_tokens += len(update.token_ids)
        self._last_tokens_at = now

    def _append_requested(self, update: StepUpdate, samples: SampleResult) -> None:
        unfinished = self._unfinished
        for name, values_S in (("log_probs", samples.logprobs_S), ("ranks", samples.ranks_S)):
            if values_S is None:
                continue
            values = values_S.tolist()
            for request_id, index in zip(update.request_ids, update.sample_indices, strict=True):
                requested = unfinished[request_id].requested
                if name in requested:
                    requested[name].append(values[index])
        if samples.top_ids_SN is None or samples.top_logprobs_SN is None:
            return
        for request_id, index in zip(update.request_ids, update.sample_indices, strict=True):
            state = unfinished[request_id]
            if (column := state.requested.get("top_n")) is not None:
                top_n = _params(state.segment).top_n_logprobs
                ids_N, logprobs_N = samples.top_ids_SN[index], samples.top_logprobs_SN[index]
                column.append(_top_n(ids_N, logprobs_N, top_n))

    def _append_prompt_scores(self, scored: ScoredPrompt, scores: ScoreResult) -> None:
        segment = segment_of_prompt(self._unfinished[scored.request_id].record.requests)
        assert isinstance(segment.prompt_log_probs, array)
        segment.prompt_log_probs.extend(scores.logprobs_P[scored.start : scored.end].tolist())
        if isinstance(segment.prompt_ranks, array):
            assert scores.ranks_P is not None
            segment.prompt_ranks.extend(scores.ranks_P[scored.start : scored.end].tolist())
        if segment.prompt_top_n_logprobs is not None:
            top_ids, top_logprobs = scores.top_ids_PN, scores.top_logprobs_PN
            assert top_ids is not None
            assert top_logprobs is not None
            top_n = _params(segment).top_n_logprobs
            segment.prompt_top_n_logprobs += [
                _top_n(top_ids[i], top_logprobs[i], top_n) for i in range(scored.start, scored.end)
            ]

    # ---- endings

    def _finish(self, finished: FinishedRequest, version: int, now: float) -> None:
        request_id, reason = finished.request_id, finished.finish_reason
        if finished.error is not None:
            self.fail(request_id, finished.error, reason, finished.kv_spans, version)
            return
        segment = self._unfinished[request_id].segment
        segment.status, segment.finish_reason = Status.COMPLETED, reason
        segment.stop_reason = finished.stop_reason
        segment.add_event_finish()
        self._end(request_id, finished.kv_spans, version, now)

    def fail(
        self,
        request_id: int,
        error: Exception,
        finish_reason: str,
        kv_spans: VersionSpans,
        version: int,
    ) -> None:
        """End a request with an error. Its record keeps the tokens so far and gets the events
        ERROR_NONTRANSIENT and FAIL."""
        segment = self._unfinished[request_id].segment
        segment.status, segment.finish_reason = Status.FAILED, finish_reason
        segment.add_event_error_nontransient(error)
        segment.add_event_fail()
        self._end(request_id, kv_spans, version, time.monotonic())

    def _end(self, request_id: int, kv_spans: VersionSpans, version: int, now: float) -> None:
        state = self._unfinished.pop(request_id)
        record, segment = state.record, state.segment
        segment.kv_spans = kv_spans
        segment.routing_indices = self._take_routing(request_id)
        for part in record.requests:
            part.complete()
        segment.generated_length = segment.num_generated_tokens
        record.observe_version(version)
        segment.freeze_versions(version, num_sampled_before=state.num_before)
        record.latency = now - state.entry_time
        self._totals.add_end(segment.finish_reason or "error", record.latency)
        self._ended[request_id] = record

    def _take_routing(self, request_id: int) -> torch.Tensor | None:
        return None if self._routing is None else _as_tensor(self._routing.take(request_id))


def _requested_of(run: TokenRun) -> dict[str, Any]:
    """Return the REQUESTED_COLUMNS of a run by `run_field`, without columns that are None."""
    columns = {column.run_field: getattr(run, column.run_field) for column in REQUESTED_COLUMNS}
    return {
        name: own.rows() if isinstance(own, TopNRun) else own
        for name, own in columns.items()
        if own is not None
    }


def _runs_of(rows: Sequence[int], token_ids: array[int], requested: Mapping[str, Any]) -> TokenRuns:
    """Return the runs of new tokens. Each request has one policy version and one KV run.

    `rows` is flat. For each request it has the id, the offset, the number of tokens, the entry
    version, the context length of the first token, the policy version, and the four values of the
    KV's VersionSpans.last_run. After them it has, for each column of `requested`, whether the
    request has that column.
    """
    # np.array of a list takes several times as long.
    packed = struct.pack(f"{len(rows)}q", *rows)
    of_requests_VR = np.frombuffer(packed, np.int64).reshape(-1, 10 + len(requested)).T
    request_ids, offsets, counts, entry_versions = of_requests_VR[:4]
    of_tokens_VT = of_requests_VR[4:10]
    if len(token_ids) != len(counts):  # else each request has one token
        of_tokens_VT = np.repeat(of_tokens_VT, counts, axis=1)
        ends = np.cumsum(counts)
        of_tokens_VT[0] += np.arange(len(token_ids)) - np.repeat(ends - counts, counts)
    length_T, policy_T, start_T, version_T, oldest_T, before_T = of_tokens_VT
    columns: dict[str, Any] = {}
    for (name, values), has_values_R in zip(requested.items(), of_requests_VR[10:], strict=True):
        columns[f"has_{name}"] = has_values_R.astype(np.uint8)
        if isinstance(values, array):
            columns[name] = np.array(values)
        elif values:
            columns[name] = TopNRun.from_rows(values)
    return TokenRuns(
        request_ids=request_ids,
        attempts=np.zeros_like(request_ids),
        offsets=offsets,
        counts=counts.astype(np.int32),
        entry_versions=entry_versions.astype(np.int32),
        token_ids=np.array(token_ids),
        policy_versions=policy_T.astype(np.int32),
        context_kv_version_min=oldest_T.astype(np.int32),
        context_kv_version_mean=(before_T + (length_T - start_T) * version_T) / length_T,
        **columns,
    )


def needs_prompt_scores(record: DynamicInferenceRequestRecord) -> bool:
    """Return whether the engine must score the prompt of an unfinished request that enters it. It
    must if prompt scores are wanted, and if the request has no generated tokens yet or came from
    another engine without prompt scores."""
    first = record[0]
    is_fresh = len(record.current.prompt_tokens) == len(first.prompt_tokens)
    has_none = segment_of_prompt(record.requests).prompt_log_probs is None
    return not _params(first).skip_prompt_log_probs and (is_fresh or has_none)


def _queue_without_kv(record: DynamicInferenceRequestRecord, num_unscored: int | None) -> None:
    """Reset the current segment to its state in the queue, before any of its prompt was computed.
    The prompt is also scored again if it is the original prompt, or has `num_unscored` tokens."""
    segment = record.current
    segment.status = Status.WAITING_IN_QUEUE
    segment.kv_spans = VersionSpans()
    segment.finished_chunk_token_count = 0
    scored = segment_of_prompt(record.requests)
    if segment is not scored:
        _clear_prompt_scores(segment, are_wanted=False)
    if len(segment.prompt_tokens) == num_unscored or segment is scored:
        _clear_prompt_scores(scored, are_wanted=not _params(scored).skip_prompt_log_probs)


def _clear_prompt_scores(segment: DynamicInferenceRequest, *, are_wanted: bool) -> None:
    """Set the prompt's score columns to empty values if scores are wanted, else to None."""
    values: Any = array("f")  # declared as a list, as in RequestState
    ranks: Any = array("i")
    params = _params(segment)
    segment.prompt_log_probs = values if are_wanted else None
    segment.prompt_ranks = ranks if are_wanted and params.return_ranks else None
    has_top_n = are_wanted and params.top_n_logprobs
    segment.prompt_top_n_logprobs = [] if has_top_n else None


def _as_tensor(rows: NDArray[np.int16] | None) -> torch.Tensor | None:
    return None if rows is None else torch.from_numpy(rows)


def _params(segment: DynamicInferenceRequest) -> SamplingParams:
    assert segment.sampling_params is not None
    return segment.sampling_params


def _top_n(ids: NDArray[np.int64], logprobs: NDArray[np.float32], top_n: int) -> dict[int, float]:
    return dict(zip(ids[:top_n].tolist(), logprobs[:top_n].tolist(), strict=True))
