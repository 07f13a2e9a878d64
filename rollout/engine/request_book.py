"""RequestBook: documents and histories of an engine's requests, written at the end of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineStateError, NonFiniteLogitsError, RequestAbortedError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.event import DynamicInferenceEventType
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.sampling_params import SamplingParams
from rollout.scheduling.commit import Committed, SampledToken, ScoredPrompt
from rollout.step.output import StepOutput
from rollout.version_spans import VersionSpans


class RequestBook:
    """One record per request. An ended one is handed out once and then forgotten."""

    def __init__(self, *, track_paused: bool, track_generated_tokens: bool) -> None:
        self._track_paused = track_paused
        self._track_generated_tokens = track_generated_tokens
        self._records: dict[int, DynamicInferenceRequestRecord] = {}
        self._ended: dict[int, None] = {}  # ids in the order of their ends
        self._last_token_times: dict[int, float] = {}

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

    def open(self, request: DynamicInferenceRequest) -> None:
        """Enter a new request, queued."""
        request.status = Status.WAITING_IN_QUEUE
        _clear_prompt_scores(request, will_be_scored=True)
        request.arrival_time = request.add_event_add_engine().timestamp
        self._records[request.request_id] = DynamicInferenceRequestRecord.from_request(request)

    def reopen(self, record: DynamicInferenceRequestRecord) -> None:
        """Enter an unfinished record that came from another engine, queued.

        It keeps the time of its first arrival. Its KV, wherever it was, is not here.
        """
        segment = record.current
        segment.status = Status.WAITING_IN_QUEUE
        segment.finished_chunk_token_count = 0
        segment.kv_spans = VersionSpans()
        is_unchanged = len(segment.prompt_tokens) == len(record[0].prompt_tokens)
        _clear_prompt_scores(segment, will_be_scored=is_unchanged)
        events = (event for part in record.requests for event in part.events)
        arrivals = (e for e in events if e.type is DynamicInferenceEventType.ADD_ENGINE)
        segment.event_add_engine = next(arrivals, None) or segment.add_event_add_engine()
        self._records[record.request_id] = record

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
            record = self._records[request_id]
            if evicted or record.current.generated_tokens:
                record.checkpoint()
            segment = record.current
            segment.status = Status.WAITING_IN_QUEUE
            segment.finished_chunk_token_count = 0
            is_unchanged = len(segment.prompt_tokens) == len(record[0].prompt_tokens)
            _clear_prompt_scores(segment, will_be_scored=is_unchanged)
            if evicted:
                segment.add_event_evict()

    # ---- what a step brought

    def apply(self, committed: Committed, output: StepOutput) -> None:
        """Write a step's results into the documents, and end those that are finished by it."""
        now = time.time()
        for scored in committed.scored:
            self._append_prompt_scores(scored, output)
        for request_id, num_done in committed.prefilled:
            segment = self._records[request_id].current
            segment.finished_chunk_token_count = num_done
            if num_done == len(segment.prompt_tokens):
                segment.add_event_add_context()
        for sampled in committed.sampled:
            self._append_token(sampled, committed.weights_version, output, now)
            if sampled.finish_reason is not None:
                self._close(sampled, committed.weights_version, now)

    def _append_token(
        self, sampled: SampledToken, version: int, output: StepOutput, now: float
    ) -> None:
        if sampled.finish_reason == "error" and sampled.error is None:
            return
        segment = self._records[sampled.request_id].current
        segment.generated_tokens.append(sampled.token_id)
        segment.policy_spans.append(1, version)
        segment.context_kv_version_min.append(sampled.context_kv_version_min)
        segment.context_kv_version_mean.append(sampled.context_kv_version_mean)
        if isinstance(segment.generated_log_probs, list):
            assert output.logprobs is not None
            segment.generated_log_probs.append(float(output.logprobs[sampled.index]))
        if segment.generated_top_n_logprobs is not None:
            assert output.top_ids is not None
            assert output.top_logprobs is not None
            top_ids, top_logprobs = output.top_ids, output.top_logprobs
            top_n = _params(segment).top_n_logprobs
            segment.generated_top_n_logprobs.append(
                _top_n(top_ids[sampled.index], top_logprobs[sampled.index], top_n)
            )
        before = self._last_token_times.get(sampled.request_id)
        if before is None:
            before = _entry_time(segment)
            segment.ttft = now - before
        if segment.tpot is not None:
            segment.tpot.append(now - before)
        self._last_token_times[sampled.request_id] = now
        if self._track_generated_tokens:
            segment.add_event_generated_token(sampled.token_id)

    def _append_prompt_scores(self, scored: ScoredPrompt, output: StepOutput) -> None:
        segment = self._records[scored.request_id].current
        assert output.score_logprobs is not None
        assert isinstance(segment.prompt_log_probs, list)
        segment.prompt_log_probs += output.score_logprobs[scored.start : scored.end].tolist()
        if segment.prompt_top_n_logprobs is not None:
            assert output.score_top_ids is not None
            assert output.score_top_logprobs is not None
            top_ids, top_logprobs = output.score_top_ids, output.score_top_logprobs
            top_n = _params(segment).top_n_logprobs
            segment.prompt_top_n_logprobs += [
                _top_n(top_ids[i], top_logprobs[i], top_n) for i in range(scored.start, scored.end)
            ]

    # ---- endings

    def _close(self, sampled: SampledToken, version: int, now: float) -> None:
        if sampled.error is not None:
            self.fail(sampled.request_id, sampled.error, "error", sampled.kv_spans, version)
            return
        if sampled.finish_reason == "error":
            error = NonFiniteLogitsError(
                f"request {sampled.request_id}: the logits for its next token are not finite under "
                f"weights version {version}; check the weights for NaN, infinity or overflow"
            )
            self.fail(sampled.request_id, error, "error", sampled.kv_spans, version)
            return
        record = self._records[sampled.request_id]
        segment = record.current
        segment.status, segment.finish_reason = Status.COMPLETED, sampled.finish_reason
        segment.add_event_finish()
        self._end(record, sampled.kv_spans, version, now)

    def fail(
        self,
        request_id: int,
        error: Exception,
        finish_reason: str,
        kv_spans: VersionSpans | None,
        version: int,
    ) -> None:
        """End a request by an error; what it generated so far is kept."""
        record = self[request_id]
        segment = record.current
        segment.status, segment.finish_reason = Status.FAILED, finish_reason
        segment.add_event_error_nontransient(error)
        segment.add_event_fail()
        self._end(record, kv_spans, version, time.time())

    def abort(self, request_id: int, kv_spans: VersionSpans, version: int) -> None:
        """End a request because its owner wants no more of it."""
        error = RequestAbortedError(f"request {request_id} was aborted")
        self.fail(request_id, error, "abort", kv_spans, version)

    def _end(
        self,
        record: DynamicInferenceRequestRecord,
        kv_spans: VersionSpans | None,
        version: int,
        now: float,
    ) -> None:
        segment = record.current
        segment.kv_spans = VersionSpans() if kv_spans is None else kv_spans.copy()
        segment.generated_length = len(segment.generated_tokens)
        record.observe_version(version)
        num_before = len(segment.prompt_tokens) - len(record[0].prompt_tokens)
        segment.freeze_versions(version, num_sampled_before=num_before)
        record.latency = now - _entry_time(segment)
        self._ended[record.request_id] = None
        self._last_token_times.pop(record.request_id, None)


def _clear_prompt_scores(segment: DynamicInferenceRequest, *, will_be_scored: bool) -> None:
    """Empty lists where values are to come, None where none were asked for or others have them."""
    params = _params(segment)
    is_wanted = will_be_scored and not params.skip_prompt_log_probs
    segment.prompt_log_probs = [] if is_wanted else None
    segment.prompt_top_n_logprobs = [] if is_wanted and params.top_n_logprobs else None


def _params(segment: DynamicInferenceRequest) -> SamplingParams:
    assert segment.sampling_params is not None
    return segment.sampling_params


def _entry_time(segment: DynamicInferenceRequest) -> float:
    """When the request entered the engine, in seconds since the epoch."""
    event = segment.event_add_engine
    assert event is not None
    assert event.timestamp is not None
    return event.timestamp


def _top_n(ids: NDArray[np.int64], logprobs: NDArray[np.float32], top_n: int) -> dict[int, float]:
    return dict(zip(ids[:top_n].tolist(), logprobs[:top_n].tolist(), strict=True))
