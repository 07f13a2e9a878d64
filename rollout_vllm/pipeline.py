"""VllmPipeline: runs vLLM's steps and writes their results into the Engine's records.

`rollout_vllm.engine` makes it. Engine calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore

from rollout.engine.counters import EngineCounters
from rollout.engine.guard import CallGuard
from rollout.engine.output_processor import OutputProcessor
from rollout.errors import RolloutError
from rollout.scheduling.output import FinishedRequest, PrefilledPrompt, ScoredPrompt, StepUpdate
from rollout.scheduling.stopping import check_stop
from rollout.step.output import ScoreResult, StepOutput
from rollout_vllm.ranks import require_workers
from rollout_vllm.samples import NO_TOP, SampledTokens
from rollout_vllm.scheduler import VllmRequest, VllmScheduler


class VllmPipeline:
    """Implements `PipelineInterface` by vLLM's EngineCore.

    vLLM's state is unknown after a failed step. So an error of a step is raised and ends the
    engine, which refuses later calls. In a fleet another engine continues the requests.
    """

    num_graph_captures = 0  # vLLM does not report them

    def __init__(
        self,
        core: EngineCore,
        scheduler: VllmScheduler,
        outputs: OutputProcessor,
        counters: EngineCounters,
        guard: CallGuard,
    ) -> None:
        self._core, self._scheduler, self._outputs = core, scheduler, outputs
        self._counters, self._guard = counters, guard
        self.last_result_at = -math.inf

    @property
    def num_in_flight(self) -> int:
        return len(self._core.batch_queue or ())

    def step(self, weights_version: int) -> None:
        with self._guard.change("step"):
            # vLLM learns in its next step which requests have ended.
            if self._core.scheduler.has_requests() or self.num_in_flight:
                self._step(weights_version)

    def commit_all(self) -> None:
        with self._guard.change("step"):
            version = self._scheduler.vllm.version
            while self.num_in_flight:
                self._commit(self._without_new_steps(), version, time.perf_counter())

    def _without_new_steps(self) -> Mapping[int, EngineCoreOutputs]:
        """Wait for the oldest step in flight, and return its output."""
        future, plan, executed = self._core.batch_queue.pop()
        output = future.result()
        if output is None:
            executed.result()  # raises its error
            raise RolloutError("vLLM returned no output of a step, and no error")
        outputs: Mapping[int, EngineCoreOutputs] = self._core.scheduler.update_from_output(
            plan, output
        )
        return outputs

    def _step(self, weights_version: int) -> None:
        start = time.perf_counter()
        try:
            outputs, has_run = self._core.step_fn()
        except Exception:
            require_workers(self._core.model_executor)  # a dead worker is the clearer error
            raise
        self._core.post_step(has_run)
        self._commit(outputs or {}, weights_version, start)

    def _commit(self, outputs: Mapping[int, EngineCoreOutputs], version: int, start: float) -> None:
        """Write the results of a step, and what vLLM has scheduled, into the records."""
        scheduler, requests = self._scheduler, self._scheduler.requests
        preempted = scheduler.take_preempted()
        self._outputs.requeue(preempted, is_preempted=True)
        scheduled = [(int(i), low, high) for i, low, high in scheduler.vllm.take_scheduled()]
        ran = [(i, low, high) for i, low, high in scheduled if i in requests]
        self._outputs.set_running([i for i, _, _ in ran])
        prompts = [each for each in ran if self._is_prompt(each[0], each[1])]
        prefilled = [self._prefilled(i, high) for i, _, high in prompts]
        num_prefilled = sum(high - low for _, low, high in prompts)
        sampled, finished = SampledTokens(), []
        scored: list[ScoredPrompt] = []
        scores: list[_Scores] = []
        for output in (each for group in outputs.values() for each in group.outputs):
            request_id = int(output.request_id)
            if (request := requests.get(request_id)) is None:
                continue
            if output.new_prompt_logprobs_tensors is not None and request.is_scored:
                first = sum(len(each[0]) for each in scores)
                scores.append(_scores(output.new_prompt_logprobs_tensors))
                last = first + len(scores[-1][0])
                scored.append(ScoredPrompt(request_id=request_id, start=first, end=last))
                request.is_scored = False
            if (end := self._append(request_id, request, output, sampled)) is not None:
                finished.append(end)
        update = StepUpdate(
            weights_version=version,
            request_ids=sampled.request_ids,
            token_ids=sampled.token_ids,
            sample_indices=range(len(sampled.token_ids)),
            finished=finished,
            prefilled=prefilled,
            scored=scored,
        )
        result = StepOutput(samples=sampled.result(), scores=_joined(scores))
        self._outputs.process_outputs(update, result)
        self.last_result_at = time.perf_counter()
        self._counters.steps.num_evictions += len(preempted)
        self._counters.add_step(
            num_prefill_tokens=num_prefilled,
            num_decode_tokens=sum(high - low for _, low, high in scheduled) - num_prefilled,
            num_sampled_tokens=len(sampled.token_ids),
            seconds=self.last_result_at - start,
            weights_version=version,
            counts=scheduler.counts,
        )

    def _is_prompt(self, request_id: int, first: int) -> bool:
        return first < self._scheduler.requests[request_id].num_entered

    def _prefilled(self, request_id: int, end: int) -> PrefilledPrompt:
        vllm, name = self._scheduler.vllm, str(request_id)
        return PrefilledPrompt(
            request_id=request_id,
            num_tokens=min(end, self._scheduler.requests[request_id].num_entered),
            num_cached_tokens=vllm.num_cached[name],
            kv_spans=vllm.spans[name],
        )

    def _append(
        self,
        request_id: int,
        request: VllmRequest,
        output: EngineCoreOutput,
        sampled: SampledTokens,
    ) -> FinishedRequest | None:
        """Append a request's new tokens until it ends. Returns None if it continues."""
        for index, token_id in enumerate(output.new_token_ids):
            request.tokens.append(token_id)
            sampled.add(request_id, token_id, *_described(output, index))
            stop = check_stop(request.tokens, request.num_prompt, request.rule)
            if stop is not None:
                return FinishedRequest(
                    request_id=request_id,
                    finish_reason=stop.finish_reason,
                    stop_reason=stop.stop_reason,
                    kv_spans=self._scheduler.finish_request(request_id),
                )
        if output.finish_reason is None:
            return None
        return FinishedRequest(
            request_id=request_id,
            finish_reason="error",
            stop_reason=None,
            error=RolloutError(f"vLLM ended request {request_id} by {output.finish_reason!s}"),
            kv_spans=self._scheduler.finish_request(request_id),
        )

    def measure_step(self, weights_version: int) -> None:
        start = time.perf_counter()
        self._core.execute_dummy_batch()
        self._counters.step_times.add(1, time.perf_counter() - start)

    def suspects(self) -> list[int]:
        return []

    def remove(self, request_id: int) -> None:
        pass


def _described(
    output: EngineCoreOutput, index: int
) -> tuple[float, int, tuple[Sequence[int], Sequence[float]]]:
    """Return log-prob, rank and most likely tokens of the token at `index` of an output."""
    if (lists := output.new_logprobs) is None:
        return math.nan, 0, NO_TOP
    top = lists.logprob_token_ids[index][1:], lists.logprobs[index][1:]
    return float(lists.logprobs[index][0]), int(lists.sampled_token_ranks[index]), top


_Scores = tuple[Any, Any, Any, Any]  # log-probs [P], ranks [P], ids [P, N], log-probs [P, N]


def _scores(tensors: Any) -> _Scores:
    """Return a prompt's scores as arrays, from vLLM's LogprobsTensors."""
    ids, logprobs = tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy()
    return logprobs[:, 0], tensors.selected_token_ranks.numpy(), ids[:, 1:], logprobs[:, 1:]


def _joined(scores: list[_Scores]) -> ScoreResult | None:
    if not scores:
        return None
    width = max(ids.shape[1] for _, _, ids, _ in scores)
    padded = [
        (np.pad(ids, ((0, 0), (0, width - ids.shape[1]))),
         np.pad(top, ((0, 0), (0, width - top.shape[1]))))
        for _, _, ids, top in scores
    ]  # fmt: skip
    return ScoreResult(
        logprobs_P=np.concatenate([logprobs for logprobs, *_ in scores]),
        ranks_P=np.concatenate([ranks for _, ranks, *_ in scores]),
        top_ids_PN=np.concatenate([ids for ids, _ in padded]),
        top_logprobs_PN=np.concatenate([top for _, top in padded]),
    )
