"""RequestBook: documents and histories of an engine's requests, written at the end of a step."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.new_tokens import new_tokens
from rollout.engine.running_request import RunningRequest
from rollout.errors import EngineStateError, RequestAbortedError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.event import DynamicInferenceEventType
from rollout.requests.generated_tokens import GeneratedColumns
from rollout.requests.merging import segment_of_prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.sampling_params import SamplingParams
from rollout.scheduling.output import FinishedRequest, ScoredPrompt, StepUpdate
from rollout.step.output import StepOutput
from rollout.version_spans import VersionSpans


class RequestBook:
    """One record per request. An ended one is handed out once and then forgotten.

    While a request is not ended its record is not complete: only copies of it leave this object.
    """

    def __init__(self, *, track_paused: bool, track_generated_tokens: bool) -> None:
        self._track_paused = track_paused
        self._track_generated_tokens = track_generated_tokens
        self._records: dict[int, DynamicInferenceRequestRecord] = {}
        self._running: dict[int, RunningRequest] = {}  # those not ended, queued ones included
        self._ended: dict[int, None] = {}  # ids in the order of their ends

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._records

    def __getitem__(self, request_id: int) -> DynamicInferenceRequestRecord:
        try:
            return self._records[request_id]
        except KeyError:
            raise EngineStateError(
                f"request {request_id} is not in the engine: it was never added, or was handed out "
                "when it finished"
            ) from None

    def has_ended(self, request_id: int) -> bool:
        """Whether the request waits to be handed out. Raises EngineStateError if it is unknown."""
        return self[request_id].request_id in self._ended

    def ended_ids(self) -> list[int]:
        """Requests that wait to be handed out, oldest end first."""
        return list(self._ended)

    def hand_out(self, request_id: int) -> DynamicInferenceRequestRecord:
        """The record of an ended request, forgotten here."""
        del self._ended[request_id]
        return self._records.pop(request_id)

    def copy_running(
        self, request_id: int, kv_spans: VersionSpans, version: int
    ) -> DynamicInferenceRequestRecord:
        """A copy of the record of a request that has not ended, as of now."""
        copied = self[request_id].copy()
        copied.current.kv_spans = kv_spans
        copied.observe_version(version)
        return copied

    def new_tokens(self, wanted: Iterable[tuple[int, int]]) -> GeneratedColumns:
        """The tokens from an offset on of requests that have not ended, by (request id, offset)."""
        return new_tokens(self._running, wanted)

    def open(self, request: DynamicInferenceRequest) -> None:
        """Enter a new request, queued."""
        request.status = Status.WAITING_IN_QUEUE
        _clear_prompt_scores(request, will_be_scored=True)
        request.arrival_time = request.add_event_add_engine().timestamp
        self._enter(DynamicInferenceRequestRecord.from_request(request))

    def reopen(self, record: DynamicInferenceRequestRecord) -> None:
        """Enter an unfinished record that came from another engine, queued.

        It keeps the time of its first arrival. Its KV, wherever it was, is not here.
        """
        segment, is_scored = record.current, needs_prompt_scores(record)
        num_entered = len(segment.prompt_tokens) if is_scored else None
        _queue_without_kv(record, num_entered)
        events = (event for part in record.requests for event in part.events)
        arrivals = (e for e in events if e.type is DynamicInferenceEventType.ADD_ENGINE)
        segment.event_add_engine = next(arrivals, None) or segment.add_event_add_engine()
        self._enter(record, num_entered)

    def _enter(self, record: DynamicInferenceRequestRecord, num_entered: int | None = None) -> None:
        self._records[record.request_id] = record
        entry_time = _entry_time(record.current)
        self._running[record.request_id] = RunningRequest(record, entry_time, num_entered)

    # ---- what the scheduler decided

    def note_admitted(self, request_ids: Iterable[int]) -> None:
        """They hold a row and blocks now."""
        for request_id in request_ids:
            self._records[request_id].current.status = Status.ACTIVE_AND_GENERATING_TOKENS

    def note_paused(self, request_ids: Iterable[int]) -> None:
        """They hold blocks but found none for their next token."""
        for request_id in request_ids:
            segment = self._records[request_id].current
            segment.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
            if self._track_paused:
                segment.add_event_pause()

    def note_requeued(self, request_ids: Iterable[int], *, evicted: bool) -> None:
        """Their KV is gone: what was generated becomes part of the prompt of a new segment.

        Only an eviction leaves an EVICT event. A request that had generated nothing yet and was not
        evicted starts again as the same segment.
        """
        for request_id in request_ids:
            record, running = self._records[request_id], self._running[request_id]
            if evicted or record.current.num_generated_tokens:
                running.checkpoint()
            _queue_without_kv(record, running.num_entered)
            if evicted:
                record.current.add_event_evict()

    def note_transient_error(self, request_ids: Iterable[int], error: Exception) -> None:
        """A step that they were part of failed."""
        for request_id in request_ids:
            self._records[request_id].current.add_event_error_transient(error)

    # ---- what a step brought

    def apply(self, committed: StepUpdate, output: StepOutput) -> None:
        """Write a step's results into the documents, and end those that are finished by it."""
        now = time.monotonic()
        for scored in committed.scored:
            self._append_prompt_scores(scored, output)
        for prefilled in committed.prefilled:
            segment = self._records[prefilled.request_id].current
            segment.finished_chunk_token_count = prefilled.num_tokens
            segment.kv_spans = prefilled.kv_spans
            if prefilled.num_tokens == len(segment.prompt_tokens):
                segment.add_event_add_context()
        self._append_tokens(committed, now)
        if output.logprobs is not None:
            self._append_log_probs(committed, output)
        if self._track_generated_tokens:
            for request_id, token_id in zip(
                committed.request_ids, committed.token_ids, strict=True
            ):
                self._records[request_id].current.add_event_generated_token(token_id)
        for finished in committed.finished:
            self._close(finished, committed.weights_version, now)

    def _append_tokens(self, committed: StepUpdate, now: float) -> None:
        """A step of 1,000 rows passes here 1,000 times: nothing is looked up or called twice."""
        running, version = self._running, committed.weights_version
        for request_id, token_id in zip(committed.request_ids, committed.token_ids, strict=True):
            request = running[request_id]
            request.token_ids.append(token_id)
            request.policy_spans.append(1, version)
            before = request.last_token_time
            if before is None:
                before = request.entry_time
                request.record.current.ttft = now - before
            request.last_token_time = now
            if request.tpot is not None:
                request.tpot.append(now - before)

    def _append_log_probs(self, committed: StepUpdate, output: StepOutput) -> None:
        assert output.logprobs is not None
        log_probs, running = output.logprobs.tolist(), self._running
        for request_id, index in zip(committed.request_ids, committed.sample_indices, strict=True):
            request = running[request_id]
            if request.log_probs is not None:
                request.log_probs.append(log_probs[index])
            if request.top_n is not None:
                assert output.top_ids is not None
                assert output.top_logprobs is not None
                top_n = _params(request.record.current).top_n_logprobs
                request.top_n.append(
                    _top_n(output.top_ids[index], output.top_logprobs[index], top_n)
                )

    def _append_prompt_scores(self, scored: ScoredPrompt, output: StepOutput) -> None:
        segment = segment_of_prompt(self._records[scored.request_id].requests)
        assert output.score_logprobs is not None
        assert isinstance(segment.prompt_log_probs, array)
        segment.prompt_log_probs.extend(output.score_logprobs[scored.start : scored.end].tolist())
        if segment.prompt_top_n_logprobs is not None:
            assert output.score_top_ids is not None
            assert output.score_top_logprobs is not None
            top_ids, top_logprobs = output.score_top_ids, output.score_top_logprobs
            top_n = _params(segment).top_n_logprobs
            segment.prompt_top_n_logprobs += [
                _top_n(top_ids[i], top_logprobs[i], top_n) for i in range(scored.start, scored.end)
            ]

    # ---- endings

    def _close(self, finished: FinishedRequest, version: int, now: float) -> None:
        request_id, reason = finished.request_id, finished.finish_reason
        if finished.error is not None:
            self.fail(request_id, finished.error, reason, finished.kv_spans, version)
            return
        record = self._records[request_id]
        segment = record.current
        segment.status, segment.finish_reason = Status.COMPLETED, reason
        segment.add_event_finish()
        self._end(record, finished.kv_spans, version, now)

    def fail(
        self,
        request_id: int,
        error: Exception,
        finish_reason: str,
        kv_spans: VersionSpans,
        version: int,
    ) -> None:
        """End a request by an error; what it generated so far is kept."""
        record = self[request_id]
        segment = record.current
        segment.status, segment.finish_reason = Status.FAILED, finish_reason
        segment.add_event_error_nontransient(error)
        segment.add_event_fail()
        self._end(record, kv_spans, version, time.monotonic())

    def abort(self, request_id: int, kv_spans: VersionSpans, version: int) -> None:
        """End a request because its owner wants no more of it."""
        error = RequestAbortedError(f"request {request_id} was aborted")
        self.fail(request_id, error, "abort", kv_spans, version)

    def _end(
        self,
        record: DynamicInferenceRequestRecord,
        kv_spans: VersionSpans,
        version: int,
        now: float,
    ) -> None:
        segment = record.current
        segment.kv_spans = kv_spans.copy()
        for part in record.requests:
            part.complete()
        segment.generated_length = segment.num_generated_tokens
        record.observe_version(version)
        num_before = len(segment.prompt_tokens) - len(record[0].prompt_tokens)
        segment.freeze_versions(version, num_sampled_before=num_before)
        record.latency = now - self._running.pop(record.request_id).entry_time
        self._ended[record.request_id] = None


def needs_prompt_scores(record: DynamicInferenceRequestRecord) -> bool:
    """Whether the prompt of an unfinished request is to be scored by the engine that it enters: it
    has generated nothing, or was lost with the engine that had its scores."""
    first = record[0]
    is_fresh = len(record.current.prompt_tokens) == len(first.prompt_tokens)
    has_none = segment_of_prompt(record.requests).prompt_log_probs is None
    return not _params(first).skip_prompt_log_probs and (is_fresh or has_none)


def _queue_without_kv(record: DynamicInferenceRequestRecord, num_entered: int | None) -> None:
    """Set the current segment to what it is in the queue: it computes its whole prompt again.

    `num_entered`: the tokens with which it came from another engine, if its prompt is scored here.
    """
    segment = record.current
    segment.status = Status.WAITING_IN_QUEUE
    segment.kv_spans = VersionSpans()
    segment.finished_chunk_token_count = 0
    scored = segment_of_prompt(record.requests)
    if segment is not scored:
        _clear_prompt_scores(segment, will_be_scored=False)
    if len(segment.prompt_tokens) == num_entered or segment is scored:
        _clear_prompt_scores(scored, will_be_scored=True)


def _clear_prompt_scores(segment: DynamicInferenceRequest, *, will_be_scored: bool) -> None:
    """Empty lists where values are to come, None where none were asked for or others have them."""
    params = _params(segment)
    is_wanted = will_be_scored and not params.skip_prompt_log_probs
    values: Any = array("f")  # a list for everybody else, as in RunningRequest
    segment.prompt_log_probs = values if is_wanted else None
    segment.prompt_top_n_logprobs = [] if is_wanted and params.top_n_logprobs else None


def _params(segment: DynamicInferenceRequest) -> SamplingParams:
    assert segment.sampling_params is not None
    return segment.sampling_params


def _entry_time(segment: DynamicInferenceRequest) -> float:
    """When the request entered, on the monotonic clock, which nobody sets. Events keep wall time:
    that of an entry to another engine may be ahead of this one's.
    """
    event = segment.event_add_engine
    assert event is not None
    assert event.timestamp is not None
    return time.monotonic() - max(0.0, time.time() - event.timestamp)


def _top_n(ids: NDArray[np.int64], logprobs: NDArray[np.float32], top_n: int) -> dict[int, float]:
    return dict(zip(ids[:top_n].tolist(), logprobs[:top_n].tolist(), strict=True))
