"""OutputProcessor: holds the records of an engine's requests and writes each step's output into
them.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.blocks.routing_record import RoutingRecord
from rollout.engine.counters import RequestTotals
from rollout.errors import EngineStateError
from rollout.requests.codec import TopN
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.generated_tokens import GeneratedColumns, GeneratedTokens
from rollout.requests.record import DynamicInferenceRequestRecord, segment_of_prompt
from rollout.requests.request import Status
from rollout.sampling_params import SamplingParams
from rollout.scheduling.output import FinishedRequest, ScoredPrompt, StepUpdate
from rollout.step.output import SampleResult, ScoreResult, StepOutput
from rollout.version_spans import VersionSpans


@dataclass(slots=True, eq=False)
class RequestState:
    """The record of an unfinished request, and direct references to what grows in it.

    The current segment's values are arrays, not lists: a token takes 4 bytes instead of 40. Records
    that leave the engine are complete, with lists.

    entry_time, last_token_time: on the monotonic clock; the latter is None before the first token.
    num_unscored: the number of tokens with which the request entered, if its prompt is scored here,
        else None.
    num_prompt: tokens in the prompt of the current segment. The last `num_before` of them were
        generated in earlier segments.
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
    log_probs: array[float] | None = field(init=False)
    ranks: array[int] | None = field(init=False)
    top_n: TopN | None = field(init=False)
    tpot: array[float] | None = field(init=False)

    def __post_init__(self) -> None:
        self.begin_segment()

    def begin_segment(self) -> None:
        """Put arrays into the current segment, which has generated nothing yet."""
        segment: Any = self.record.current  # its fields are lists for everybody else
        self.segment, self.num_prompt = segment, len(segment.prompt_tokens)
        self.num_before = self.num_prompt - len(self.record[0].prompt_tokens)
        self.policy_spans = segment.policy_spans
        self.token_ids = segment.generated_tokens = array("i")
        self.log_probs = segment.generated_log_probs = _empty("f", segment.generated_log_probs)
        self.ranks = segment.generated_ranks = _empty("i", segment.generated_ranks)
        self.tpot = segment.tpot = _empty("d", segment.tpot)
        self.top_n = segment.generated_top_n_logprobs


class OutputProcessor:
    """Holds one record per request. The record of an ended request is returned once and dropped.

    The record of an unfinished request is incomplete: only copies of it leave this object.
    """

    def __init__(
        self,
        *,
        track_paused: bool,
        track_generated_tokens: bool,
        totals: RequestTotals,
        routing: RoutingRecord | None = None,
    ) -> None:
        """`totals`: counters of requests and tokens. `routing`: record of the tokens' experts, if
        they are recorded."""
        self._totals, self._routing = totals, routing
        self._last_tokens_at = 0.0  # on the monotonic clock
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
        """Return the ids of the requests that have not ended."""
        return self._unfinished.keys()

    def violations(self) -> list[str]:
        """Return the invariants of the unfinished records that do not hold, one sentence each."""
        found = []
        for request_id, state in self._unfinished.items():
            num_tokens, num_versions = len(state.token_ids), len(state.policy_spans)
            if num_versions != state.num_prompt + num_tokens:
                found.append(
                    f"request {request_id} has {state.num_prompt} prompt tokens, {num_tokens} "
                    f"generated ones, and {num_versions} policy versions"
                )
            columns = (state.log_probs, state.ranks, state.top_n, state.tpot)
            if any(column is not None and len(column) != num_tokens for column in columns):
                found.append(f"request {request_id} has columns of another length than its tokens")
        if both := sorted(self._unfinished.keys() & self._ended.keys()):
            found.append(f"requests {both} have ended and have not")
        return found

    # ---- adding and returning

    def add_request(self, record: DynamicInferenceRequestRecord) -> None:
        """Add the record of a queued request, new or begun by another engine.

        A request from another engine keeps the time of its first arrival. It has no KV here.
        """
        segment, is_scored = record.current, needs_prompt_scores(record)
        num_unscored = len(segment.prompt_tokens) if is_scored else None
        _queue_without_kv(record, num_unscored)
        segment.event_add_engine = record.entry_event() or segment.add_event_add_engine()
        if len(record.requests) == 1:
            segment.arrival_time = segment.event_add_engine.timestamp
        # Events keep wall time, which may be ahead of this engine's if another one wrote it.
        seconds_ago = max(0.0, time.time() - segment.event_add_engine.timestamp)
        entry_time = time.monotonic() - seconds_ago
        self._unfinished[record.request_id] = RequestState(record, entry_time, num_unscored)

    def has_ended(self, request_id: int) -> bool:
        """Return whether the request has ended and its record was not returned yet.

        Raises EngineStateError if it is not in the engine.
        """
        if request_id not in self:
            raise EngineStateError(
                f"request {request_id} is not in the engine: it was never added, or its record was "
                "returned when it finished"
            )
        return request_id in self._ended

    def ended(self, request_ids: Iterable[int]) -> list[DynamicInferenceRequestRecord]:
        """Return the records of ended requests, which stay here until `forget_ended`."""
        return [self._ended[request_id] for request_id in request_ids]

    def forget_ended(self, request_ids: Iterable[int]) -> None:
        """Drop the records of ended requests, which the caller has received."""
        for request_id in request_ids:
            del self._ended[request_id]

    def keep_ended(self, records: Iterable[DynamicInferenceRequestRecord]) -> None:
        """Keep records that `ended` returned, dropped or not, because they did not reach the
        caller."""
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
        """Return a copy of the record as of now, under weights `version`.

        `kv_spans`: the versions that wrote the KV of an unfinished request; None for an ended one.
        `routing`: the experts of an unfinished request's tokens.
        """
        if kv_spans is None:
            return self._ended[request_id].copy()
        copied = self._unfinished[request_id].record.copy()
        copied.current.kv_spans = kv_spans
        copied.current.routing_indices = _as_tensor(routing)
        copied.observe_version(version)
        return copied

    def new_tokens(self, wanted: Iterable[tuple[int, int]]) -> GeneratedColumns:
        """Return the tokens from an offset on of each (request id, offset).

        Requests that have ended, or have no such tokens, are left out. Hundreds of requests with
        one token each pass here in every step: what all new tokens of a request share is gathered
        once per request, and NumPy spreads it over the tokens. They share it unless the weights
        changed among them or the request was queued again: those few are put in afterwards.
        """
        rows: list[int] = []
        token_ids, log_probs, ranks = array("i"), array("f"), array("i")
        top_n: TopN = []
        others: list[tuple[int, GeneratedTokens]] = []  # and where their tokens start
        for request_id, offset in wanted:
            state = self._unfinished.get(request_id)
            if state is None or offset - state.num_before >= len(state.token_ids):
                continue
            start = offset - state.num_before
            first = state.num_prompt + start  # length of the first token's context
            policy_start, policy_version, _, _ = state.policy_spans.last_run
            kv_run = state.segment.kv_spans.last_run
            new_log_probs: Iterable[float] | None
            new_ranks: Iterable[int] | None
            if start >= 0 and policy_start <= first and kv_run[0] < first:
                token_ids.extend(state.token_ids[start:])
                new_log_probs = None if state.log_probs is None else state.log_probs[start:]
                new_ranks = None if state.ranks is None else state.ranks[start:]
                new_top_n = None if state.top_n is None else state.top_n[start:]
            else:
                tokens = GeneratedTokens.of(state.record, offset)
                assert tokens is not None
                others.append((len(token_ids), tokens))
                token_ids.extend(tokens.token_ids)
                new_log_probs, new_top_n = tokens.log_probs, tokens.top_n
                new_ranks = tokens.ranks
            log_probs.extend(new_log_probs if new_log_probs is not None else ())
            ranks.extend(new_ranks if new_ranks is not None else ())
            top_n += new_top_n or ()
            rows += (
                request_id,
                offset,
                len(state.token_ids) - start,
                state.record[0].weights_version,
            )
            rows += (new_log_probs is not None, new_ranks is not None, new_top_n is not None)
            rows += (first, policy_version, *kv_run)
        columns = GeneratedColumns.of_rows(rows, token_ids, log_probs, ranks, top_n)
        for start, tokens in others:
            columns.set_versions(start, tokens)
        return columns

    # ---- what the scheduler decided

    def set_running(self, request_ids: Iterable[int]) -> None:
        """Mark requests as running."""
        for request_id in request_ids:
            segment = self._unfinished[request_id].segment
            segment.status = Status.ACTIVE_AND_GENERATING_TOKENS

    def set_paused(self, request_ids: Iterable[int]) -> None:
        """Mark requests as paused: no block was free for their next token."""
        for request_id in request_ids:
            segment = self._unfinished[request_id].segment
            segment.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
            if self._track_paused:
                segment.add_event_pause()

    def requeue(self, request_ids: Iterable[int], *, is_preempted: bool = False) -> None:
        """Mark requests that lost their KV as queued. Each gets a new segment, whose prompt is all
        of its tokens so far.

        Only preemption adds an EVICT event. A request that had generated nothing and was not
        preempted starts again as the same segment. Its experts are not kept, because no token was
        sampled from them.
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
        """Add an ERROR_TRANSIENT event to each of these requests."""
        for request_id in request_ids:
            self._unfinished[request_id].segment.add_event_error_transient(error)

    # ---- a step's output

    def process_outputs(self, update: StepUpdate, output: StepOutput) -> None:
        """Write a step's results into the records, and end the requests that it finished."""
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
        if samples.logprobs_S is not None:
            self._append_log_probs(update, samples)
        if samples.ranks_S is not None:
            self._append_ranks(update, samples.ranks_S.tolist())
        if self._track_generated_tokens:
            for request_id, token_id in zip(update.request_ids, update.token_ids, strict=True):
                self._unfinished[request_id].segment.add_event_generated_token(token_id)
        for finished in update.finished:
            self._finish(finished, update.weights_version, now)

    def _append_tokens(self, update: StepUpdate, now: float) -> None:
        """Append a token and its versions to each request.

        A step of 1,000 rows passes here 1,000 times, so that nothing is looked up or called twice.
        """
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
                if not state.num_before:  # else another engine has drawn the first token
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

    def _append_log_probs(self, update: StepUpdate, samples: SampleResult) -> None:
        assert samples.logprobs_S is not None
        top_ids_SN, top_logprobs_SN = samples.top_ids_SN, samples.top_logprobs_SN
        log_probs, unfinished = samples.logprobs_S.tolist(), self._unfinished
        for request_id, index in zip(update.request_ids, update.sample_indices, strict=True):
            state = unfinished[request_id]
            if state.log_probs is not None:
                state.log_probs.append(log_probs[index])
            if state.top_n is not None:
                assert top_ids_SN is not None
                assert top_logprobs_SN is not None
                top_n = _params(state.segment).top_n_logprobs
                state.top_n.append(_top_n(top_ids_SN[index], top_logprobs_SN[index], top_n))

    def _append_ranks(self, update: StepUpdate, ranks: list[int]) -> None:
        for request_id, index in zip(update.request_ids, update.sample_indices, strict=True):
            state = self._unfinished[request_id]
            if state.ranks is not None:
                state.ranks.append(ranks[index])

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
        """End a request by an error. Its record keeps what it generated so far."""
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


def needs_prompt_scores(record: DynamicInferenceRequestRecord) -> bool:
    """Return whether the engine that an unfinished request enters scores its prompt.

    It does if scores are wanted and the request has generated nothing yet, or lost its scores with
    another engine.
    """
    first = record[0]
    is_fresh = len(record.current.prompt_tokens) == len(first.prompt_tokens)
    has_none = segment_of_prompt(record.requests).prompt_log_probs is None
    return not _params(first).skip_prompt_log_probs and (is_fresh or has_none)


def _queue_without_kv(record: DynamicInferenceRequestRecord, num_unscored: int | None) -> None:
    """Reset the current segment to its state in the queue: it computes its whole prompt again.

    Its prompt is scored again if it is the original one, or the `num_unscored` tokens with which
    the request entered.
    """
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
    """Set the prompt's columns: empty where scores are wanted, else None."""
    values: Any = array("f")  # lists for everybody else, as in RequestState
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


def _empty(typecode: Any, values: object) -> Any:
    """Return an empty array; None if `values` is None, because they were not requested."""
    return None if values is None else array(typecode)
