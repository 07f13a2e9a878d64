"""RequestBook: the documents and histories of an engine's requests, written at the end of a step."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rollout.errors import EngineStateError, NonFiniteLogitsError, RequestAbortedError
from rollout.requests.dynamic_request import DynamicInferenceRequest
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import Status
from rollout.scheduling.commit import Committed, SampledToken, ScoredPrompt
from rollout.step.output import StepOutput
from rollout.version_spans import VersionSpans


class RequestBook:
    """One record per unfinished request. A finished one is handed out once and forgotten."""

    def __init__(self, *, track_paused: bool, track_generated_tokens: bool) -> None:
        self._track_paused = track_paused
        self._track_generated_tokens = track_generated_tokens
        self._records: dict[int, DynamicInferenceRequestRecord] = {}
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

    def open(self, request: DynamicInferenceRequest) -> None:
        """Enter a new request, queued."""
        request.status = Status.WAITING_IN_QUEUE
        request.arrival_time = request.add_event_add_engine().timestamp
        self._records[request.request_id] = DynamicInferenceRequestRecord.from_request(request)

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
            segment.prompt_log_probs = segment.prompt_top_n_logprobs = None
            if evicted:
                segment.add_event_evict()

    # ---- what a step brought

    def apply(
        self, committed: Committed, output: StepOutput
    ) -> list[DynamicInferenceRequestRecord]:
        """Write a step's results into the documents. Returns the records that are finished by it."""
        now = time.time()
        for scored in committed.scored:
            self._append_prompt_scores(scored, output)
        for request_id in committed.prefilled:
            segment = self._records[request_id].current
            segment.finished_chunk_token_count = len(segment.prompt_tokens)
            segment.add_event_add_context()
        finished = []
        for sampled in committed.sampled:
            self._append_token(sampled, committed.weights_version, output, now)
            if sampled.finish_reason is not None:
                finished.append(self._close(sampled, committed.weights_version, now))
        return finished

    def _append_token(
        self, sampled: SampledToken, version: int, output: StepOutput, now: float
    ) -> None:
        if sampled.finish_reason == "error":
            return
        segment = self._records[sampled.request_id].current
        segment.generated_tokens.append(sampled.token_id)
        segment.policy_spans.append(1, version)
        segment.context_kv_version_min.append(sampled.context_kv_version_min)
        segment.context_kv_version_mean.append(sampled.context_kv_version_mean)
        if segment.generated_log_probs is not None:
            segment.generated_log_probs.append(float(output.logprobs[sampled.index]))
        if segment.generated_top_n_logprobs is not None:
            top_n = segment.sampling_params.top_n_logprobs
            segment.generated_top_n_logprobs.append(
                _top_n(output.top_ids[sampled.index], output.top_logprobs[sampled.index], top_n)
            )
        before = self._last_token_times.get(sampled.request_id)
        if before is None:
            before = segment.event_add_engine.timestamp
            segment.ttft = now - before
        segment.tpot.append(now - before)
        self._last_token_times[sampled.request_id] = now
        if self._track_generated_tokens:
            segment.add_event_generated_token(sampled.token_id)

    def _append_prompt_scores(self, scored: ScoredPrompt, output: StepOutput) -> None:
        segment = self._records[scored.request_id].current
        if segment.prompt_log_probs is None:
            segment.prompt_log_probs = []
        segment.prompt_log_probs += output.score_logprobs[scored.start : scored.end].tolist()
        top_n = segment.sampling_params.top_n_logprobs
        if top_n:
            segment.prompt_top_n_logprobs = segment.prompt_top_n_logprobs or []
            segment.prompt_top_n_logprobs += [
                _top_n(output.score_top_ids[i], output.score_top_logprobs[i], top_n)
                for i in range(scored.start, scored.end)
            ]

    # ---- endings

    def _close(
        self, sampled: SampledToken, version: int, now: float
    ) -> DynamicInferenceRequestRecord:
        if sampled.finish_reason == "error":
            error = NonFiniteLogitsError(
                f"request {sampled.request_id}: the logits for its next token are not finite under "
                f"weights version {version}; check the weights for NaN, infinity or overflow"
            )
            return self.fail(sampled.request_id, error, "error", sampled.kv_spans, version)
        record = self._records[sampled.request_id]
        segment = record.current
        segment.status, segment.finish_reason = Status.COMPLETED, sampled.finish_reason
        segment.add_event_finish()
        return self._forget(record, sampled.kv_spans, version, now)

    def fail(
        self,
        request_id: int,
        error: Exception,
        finish_reason: str,
        kv_spans: VersionSpans,
        version: int,
    ) -> DynamicInferenceRequestRecord:
        """End a request by an error; what it generated so far is kept."""
        record = self[request_id]
        segment = record.current
        segment.status, segment.finish_reason = Status.FAILED, finish_reason
        segment.add_event_error_nontransient(error)
        segment.add_event_fail()
        return self._forget(record, kv_spans, version, time.time())

    def abort(
        self, request_id: int, kv_spans: VersionSpans, version: int
    ) -> DynamicInferenceRequestRecord:
        """End a request because its owner wants no more of it."""
        error = RequestAbortedError(f"request {request_id} was aborted")
        return self.fail(request_id, error, "abort", kv_spans, version)

    def _forget(
        self,
        record: DynamicInferenceRequestRecord,
        kv_spans: VersionSpans,
        version: int,
        now: float,
    ) -> DynamicInferenceRequestRecord:
        segment = record.current
        segment.kv_spans = kv_spans.copy()
        segment.generated_length = len(segment.generated_tokens)
        record.observe_version(version)
        segment.freeze_versions(version)
        record.latency = now - segment.event_add_engine.timestamp
        del self._records[record.request_id]
        self._last_token_times.pop(record.request_id, None)
        return record


def _top_n(ids, logprobs, top_n: int) -> dict[int, float]:
    return dict(zip(ids[:top_n].tolist(), logprobs[:top_n].tolist(), strict=True))
