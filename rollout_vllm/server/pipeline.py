"""ServerPipeline: the tokens that a vLLM server streams, written into the Engine's records.

`rollout_vllm.server.engine` makes it; Engine steps with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.counters import EngineCounters
from rollout.engine.guard import CallGuard
from rollout.engine.output_processor import OutputProcessor
from rollout.errors import InvalidRequestError, LockstepError, RolloutError
from rollout.scheduling.output import FinishedRequest, PrefilledPrompt, StepUpdate
from rollout.scheduling.stopping import check_stop
from rollout.step.output import StepOutput
from rollout_vllm.samples import NO_TOP, SampledTokens
from rollout_vllm.server.client import Chunk, ServerRefusalError, VllmServer
from rollout_vllm.server.scheduler import ServerRequest, ServerScheduler

_WAIT_S = 0.02  # for tokens, in a step
_DRAIN_WAIT_S = 0.2  # between two requests to end the streams


@dataclass(slots=True)
class _Results:
    """What the chunks of a step have brought, in the form that OutputProcessor takes."""

    sampled: SampledTokens = field(default_factory=SampledTokens)
    prefilled: list[PrefilledPrompt] = field(default_factory=list)
    finished: list[FinishedRequest] = field(default_factory=list)


def _described(
    token: Mapping[str, Any] | None,
) -> tuple[float, int, tuple[Sequence[int], Sequence[float]]]:
    """Return log-prob, rank and most likely tokens of a token. `token`: the server's description,
    None if it was not asked for one."""
    if token is None:
        return math.nan, 0, NO_TOP
    # The sampled token comes first, whatever its rank.
    likely = sorted(token["top_logprobs"], key=lambda each: each["rank"] or math.inf)
    top = [each["token_id"] for each in likely], [each["logprob"] for each in likely]
    # The server replaces log-probs that are not finite, and leaves out their ranks.
    is_finite = token["rank"] is not None
    return token["logprob"] if is_finite else math.nan, token["rank"] or 0, top


class ServerPipeline:
    """Implements `PipelineInterface` over a vLLM server.

    A step writes what has arrived since the step before. All streams end before the weights change,
    and the requests continue afterwards. So all tokens of a stream are of one version. The server
    names it at the stream's end, and a request ends only after its stream.

    If the server names other weights, all running requests fail: their tokens may have the wrong
    version. If it does not answer, LockstepError is raised, and another engine continues them.
    """

    num_graph_captures = 0  # the server does not report them

    def __init__(
        self,
        server: VllmServer,
        scheduler: ServerScheduler,
        outputs: OutputProcessor,
        counters: EngineCounters,
        guard: CallGuard,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: seconds in which the server must end streams that are aborted."""
        self._server, self._scheduler, self._outputs = server, scheduler, outputs
        self._counters, self._guard, self._timeout_s = counters, guard, timeout_s
        self.last_result_at = -math.inf

    @property
    def num_in_flight(self) -> int:
        return min(1, len(self._scheduler.running))

    def step(self, weights_version: int) -> None:
        server, scheduler = self._server, self._scheduler
        if server.failure is not None and not (server.is_foreign and scheduler.running):
            raise server.failure
        with self._guard.change("step"):
            if server.failure is None:
                self._outputs.set_running(scheduler.start_waiting())
            self._write(server.chunks(_WAIT_S), weights_version)

    def commit_all(self) -> None:
        server, scheduler = self._server, self._scheduler
        end = time.monotonic() + self._timeout_s
        while scheduler.running:
            server.abort(*scheduler.running)  # again: some may have been on their way to the server
            with self._guard.change("step"):
                self._write(server.chunks(_DRAIN_WAIT_S), scheduler.version())
            if scheduler.running and server.failure is not None:
                raise server.failure
            if scheduler.running and time.monotonic() > end:
                raise LockstepError(
                    f"the vLLM server at {server.url} has not ended {len(scheduler.running)} "
                    f"aborted requests within {self._timeout_s:g} s"
                )

    def _write(self, chunks: Sequence[Chunk], version: int) -> None:
        """Write chunks into the records."""
        start, results = time.perf_counter(), _Results()
        for chunk in chunks:
            request_id = self._scheduler.running.get(chunk.attempt)
            if request_id is None:
                continue  # the request was aborted
            request = self._scheduler.requests[request_id]
            if chunk.choice is not None:
                self._add_tokens(request_id, request, chunk.choice, results)
                if chunk.choice["finish_reason"] is not None:
                    self._end_stream(chunk.attempt, request, chunk.choice, results)
            elif isinstance(chunk.error, ServerRefusalError):
                self._refuse(chunk.attempt, chunk.error, results)
            elif isinstance(chunk.error, LockstepError):
                self._server.failure = self._server.failure or chunk.error
        if self._server.failure is not None and self._server.is_foreign:
            # Their tokens may be of other weights.
            self._fail_running(self._server.failure, results)
        sampled = results.sampled
        if not (sampled.token_ids or results.finished):
            return
        update = StepUpdate(
            weights_version=version,
            request_ids=sampled.request_ids,
            token_ids=sampled.token_ids,
            sample_indices=range(len(sampled.token_ids)),
            finished=results.finished,
            prefilled=results.prefilled,
            scored=[],
        )
        self._outputs.process_outputs(update, StepOutput(samples=sampled.result()))
        self.last_result_at = time.perf_counter()
        self._counters.add_step(
            num_prefill_tokens=sum(each.num_tokens for each in results.prefilled),
            num_decode_tokens=len(sampled.token_ids),
            num_sampled_tokens=len(sampled.token_ids),
            seconds=self.last_result_at - start,
            weights_version=version,
            counts=self._scheduler.counts,
        )

    def _add_tokens(
        self,
        request_id: int,
        request: ServerRequest,
        choice: Mapping[str, Any],
        results: _Results,
    ) -> None:
        described = (choice["logprobs"] or {}).get("content")
        for index, token_id in enumerate(choice["token_ids"] or ()):
            if request.stop is not None:
                return  # the server learns a step later that the request has ended
            if request.is_new:
                request.is_new = False
                results.prefilled.append(
                    PrefilledPrompt(
                        request_id=request_id,
                        num_tokens=len(request.tokens),
                        num_cached_tokens=None,
                        kv_spans=request.spans,
                    )
                )
            self._scheduler.append_token(request, token_id)
            token = described[index] if described else None
            results.sampled.add(request_id, token_id, *_described(token))
            request.stop = check_stop(request.tokens, request.num_prompt, request.rule)
            is_known = request.stop is None or request.stop.finish_reason == "length"
            if not is_known and choice["finish_reason"] is None and request.attempt is not None:
                self._server.abort(request.attempt)

    def _end_stream(
        self,
        attempt: str,
        request: ServerRequest,
        choice: Mapping[str, Any],
        results: _Results,
    ) -> None:
        """Check the weights that a stream's tokens are of. Its request ends or is queued again."""
        labels = {span["version"] for span in choice["weight_versions"] or ()}
        expected = self._server.expected_label
        if labels - {expected} or (not labels and len(request.tokens) > request.num_before):
            self._server.report_foreign(", ".join(sorted(labels)) or None)
            return
        request_id = self._scheduler.end_stream(attempt)
        assert request_id is not None
        reason = choice["finish_reason"]
        if request.stop is not None:
            self._finish(request_id, request, results)
        elif reason == "abort":
            self._scheduler.requeue(request_id)
        else:
            error = RolloutError(
                f"the vLLM server ended request {request_id} by {reason!r} after "
                f"{len(request.tokens)} tokens"
            )
            self._finish(request_id, request, results, error)

    def _refuse(self, attempt: str, error: ServerRefusalError, results: _Results) -> None:
        """End a request that the server refuses. The server goes on."""
        request_id = self._scheduler.end_stream(attempt)
        assert request_id is not None
        fault = InvalidRequestError(str(error)) if error.status < 500 else error
        self._finish(request_id, self._scheduler.requests[request_id], results, fault)

    def _fail_running(self, error: LockstepError, results: _Results) -> None:
        for attempt, request_id in list(self._scheduler.running.items()):
            self._scheduler.end_stream(attempt)
            self._finish(request_id, self._scheduler.requests[request_id], results, error)

    def _finish(
        self,
        request_id: int,
        request: ServerRequest,
        results: _Results,
        error: RolloutError | None = None,
    ) -> None:
        stop = None if error is not None else request.stop
        results.finished.append(
            FinishedRequest(
                request_id=request_id,
                finish_reason="error" if stop is None else stop.finish_reason,
                stop_reason=None if stop is None else stop.stop_reason,
                error=error,
                kv_spans=self._scheduler.finish_request(request_id),
            )
        )

    def measure_step(self, weights_version: int) -> None:
        """Let the server generate a token. Raises LockstepError if its weights are others."""
        start = time.perf_counter()
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
        reply = self._server.call("POST", "/inference/v1/generate", body)
        labels = [span["version"] for span in reply["choices"][0]["weight_versions"] or ()]
        if labels != [self._server.expected_label]:
            self._server.report_foreign(", ".join(labels) or None)
        if self._server.failure is not None:
            raise self._server.failure
        # A step here waits for what has arrived: its time does not grow with the tokens.
        self._counters.step_times.add(self._scheduler.max_tokens, time.perf_counter() - start)

    def suspects(self) -> list[int]:
        return []

    def remove(self, request_id: int) -> None:
        pass
