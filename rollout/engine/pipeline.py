"""StepPipeline: schedules, launches and commits steps, and recovers from failed steps.

`rollout.engine.build` creates it, and Engine calls it. It changes the scheduler, the request
records, the counters and, through the executor, the device.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollout.engine.counters import EngineCounters
from rollout.engine.guard import CallGuard
from rollout.engine.output_processor import OutputProcessor
from rollout.engine.protocols import StepExecutor
from rollout.errors import LockstepError
from rollout.scheduling.scheduler import Scheduler
from rollout.step.output import StepOutput
from rollout.step.plan import EMPTY, StepPlan

logger = logging.getLogger(__name__)

# A request runs alone after this number of failed steps without being cleared in between.
_FAILURES_UNTIL_ALONE = 2
# Tokens that clear a request: one from a prefill step and one from a decode step.
_TOKENS_TO_CLEAR = 2


@dataclass(slots=True)
class _Suspect:
    """Number of a request's failed steps, and of the tokens that clear it once it samples them."""

    num_failures: int = 0
    num_tokens_left: int = _TOKENS_TO_CLEAR


class FaultIsolation:
    """Finds the request that makes forward passes fail, so that all other requests continue.

    Each request of a failed step is a suspect until it has sampled two more tokens. A suspect whose
    step fails again runs alone until it is cleared. If its step fails even then, the request is the
    cause.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, _Suspect] = {}

    def next_alone(self) -> int | None:
        """Return the request that must run alone in the next step; None if all requests may run."""
        for request_id, suspect in self._suspects.items():
            if suspect.num_failures >= _FAILURES_UNTIL_ALONE:
                return request_id
        return None

    def suspects(self) -> list[int]:
        """Return the request ids of all suspects."""
        return list(self._suspects)

    def add_failure(self, request_ids: Sequence[int]) -> int | None:
        """Record a failed step of these requests. Returns the request that caused the failure, or
        None if the cause is not known yet."""
        for request_id in request_ids:
            suspect = self._suspects.setdefault(request_id, _Suspect())
            suspect.num_failures += 1
            suspect.num_tokens_left = _TOKENS_TO_CLEAR
        if len(request_ids) != 1:
            return None
        (request_id,) = request_ids
        ran_alone_again = self._suspects[request_id].num_failures >= _FAILURES_UNTIL_ALONE
        return request_id if ran_alone_again else None

    def add_tokens(self, request_ids: Iterable[int]) -> None:
        """Record that each of these requests has sampled one token."""
        for request_id in request_ids if self._suspects else ():
            suspect = self._suspects.get(request_id)
            if suspect is not None:
                suspect.num_tokens_left -= 1
                if not suspect.num_tokens_left:
                    del self._suspects[request_id]

    def remove(self, request_id: int) -> None:
        """Drop a request that has ended."""
        self._suspects.pop(request_id, None)


class StepPipeline:
    """Implements `PipelineInterface`: schedules, launches and commits steps.

    One plan is in flight, or two with async scheduling: the next step is then launched before the
    result of the running step is known.

    If a forward pass raises, the requests in flight return to the queue with their tokens. Requests
    that fail again run alone, one after the other. A request that fails alone ends with its error,
    provided that a step without any request succeeds afterwards. If that step fails too, the device
    is at fault: the error is raised, and no request ends. A LockstepError is raised at once,
    because ranks have died.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: StepExecutor[Any],
        outputs: OutputProcessor,
        counters: EngineCounters,
        guard: CallGuard,
    ) -> None:
        self._scheduler, self._executor, self._guard = scheduler, executor, guard
        self._outputs, self._counters = outputs, counters
        self._faults = FaultIsolation()
        self._in_flight: deque[tuple[StepPlan, Callable[[], StepOutput]]] = deque()
        self.last_result_at = -math.inf  # by time.perf_counter

    @property
    def num_in_flight(self) -> int:
        """Number of plans that are launched and not committed."""
        return len(self._in_flight)

    @property
    def num_graph_captures(self) -> int:
        """Number of steps captured so far; 0 where steps run eagerly."""
        return self._executor.num_graph_captures

    def step(self, weights_version: int) -> None:
        """Launch the steps that may run, then commit the oldest one. Does nothing when idle. A
        failed step is logged, and its requests are queued again. The error is raised only if ranks
        have died, if a step without requests fails too, or if the error is an interrupt."""
        with self._guard.change("step"):
            start = time.perf_counter()
            alone = self._faults.next_alone()
            max_in_flight = 2 if self._executor.overlaps and alone is None else 1
            while len(self._in_flight) < max_in_flight and self._launch(alone, weights_version):
                pass
            if self._in_flight:
                self._commit_oldest(start)
            if self._scheduler.is_idle:
                self.commit_all()  # steps launched ahead for requests that have ended meanwhile

    def commit_all(self) -> None:
        """Wait for every plan in flight and commit its result."""
        with self._guard.change("step"):
            while self._in_flight:
                self._commit_oldest(time.perf_counter())

    def measure_step(self, weights_version: int) -> None:
        """Time a step of one token without any request. No plan may be in flight. The time gives
        `Engine.longest_step_s` a bound before the first request runs."""
        plan, _ = _scratch_plans(weights_version)
        with self._guard.change("measure_step"):
            self._executor.launch(plan)()  # may reserve memory and compile
            start = time.perf_counter()
            self._executor.launch(plan)()
        self._counters.step_times.add(1, time.perf_counter() - start)

    def suspects(self) -> list[int]:
        """Return the request ids of all suspects of FaultIsolation."""
        return self._faults.suspects()

    def remove(self, request_id: int) -> None:
        """Drop a request that was removed from the scheduler."""
        self._faults.remove(request_id)

    def _launch(self, alone: int | None, weights_version: int) -> bool:
        """Schedule and launch a step. If `alone` is a request id, the step contains that request
        only. Returns False if no request could run, or if the launch failed."""
        if alone is None:
            schedule = self._scheduler.schedule(weights_version)
        else:
            schedule = self._scheduler.schedule_alone(alone, weights_version)
        totals = self._counters.steps
        totals.num_pauses += len(schedule.paused)
        totals.num_evictions += len(schedule.preempted)
        totals.num_forked_requests += schedule.num_forked
        totals.num_prefix_hit_tokens += schedule.num_prefix_hit_tokens
        self._outputs.requeue(schedule.preempted, is_preempted=True)
        self._outputs.set_paused(schedule.paused)
        self._outputs.set_running((*schedule.resumed, *schedule.admitted))
        if schedule.plan is None:
            return False
        try:
            self._in_flight.append((schedule.plan, self._executor.launch(schedule.plan)))
        except BaseException as error:
            self._recover(error, weights_version)
            return False
        return True

    def _commit_oldest(self, start: float) -> None:
        plan, fetch = self._in_flight[0]
        try:
            output = fetch()
        except BaseException as error:
            self._recover(error, plan.weights_version)
            return
        self._in_flight.popleft()
        update = self._scheduler.update_from_output(plan, output)
        self._outputs.process_outputs(update, output)
        self._faults.add_tokens(update.request_ids)
        for finished in update.finished:
            self._faults.remove(finished.request_id)
        self.last_result_at = time.perf_counter()
        self._counters.add_step(
            num_prefill_tokens=len(plan.prefill_token_ids),
            num_decode_tokens=plan.num_decode_rows,
            num_sampled_tokens=len(plan.sample_rows),
            seconds=self.last_result_at - start,
            weights_version=plan.weights_version,
            counts=self._scheduler.counts,
        )

    # ---- a forward pass that failed

    def _recover(self, error: BaseException, weights_version: int) -> None:
        """Return the requests of all plans in flight to the queue, with the tokens they have. If
        one request caused the failure, it ends with `error`. Raises `error` if the device or a dead
        rank is the cause, or if `error` is an interrupt."""
        self._in_flight.clear()
        requeued = self._scheduler.abandon()
        self._outputs.requeue(requeued)
        self._counters.steps.num_failed_steps += 1
        if not isinstance(error, Exception) or isinstance(error, LockstepError):
            self._guard.mark_harmless(error)
            raise error
        culprit = self._faults.add_failure(requeued)
        if culprit is None:
            logger.warning("a step failed; its requests are queued again", exc_info=error)
            _drop_frames(error)
            self._outputs.add_transient_error(requeued, error)
            return
        if not self._can_step_without_requests(weights_version):
            self._guard.mark_harmless(error)
            raise error
        logger.error("request %d fails even alone, so it ends", culprit, exc_info=error)
        _drop_frames(error)
        self._faults.remove(culprit)
        kv_spans = self._scheduler.finish_request(culprit)
        self._outputs.fail(culprit, error, "error", kv_spans, weights_version)

    def _can_step_without_requests(self, weights_version: int) -> bool:
        """Run a prefill and a decode step without any request. Returns False if one fails."""
        try:
            for plan in _scratch_plans(weights_version):
                self._executor.launch(plan)()
        except Exception:
            logger.exception("a step without any request fails as well: the device is at fault")
            return False
        return True


def _scratch_plans(weights_version: int) -> tuple[StepPlan, StepPlan]:
    """Return a prefill and a decode step of one token in the scratch row, without any request."""
    zero, one = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
    prefill = StepPlan(
        step_id=0,
        weights_version=weights_version,
        rows=zero,
        query_lens=one,
        context_lens=one,
        prefill_token_ids=zero,
        sample_sources=zero,
        sample_rows=zero,
        sample_positions=one,
    )
    return prefill, replace(prefill, num_decode_rows=1, prefill_token_ids=EMPTY)


def _drop_frames(error: BaseException) -> None:
    """Delete the tracebacks of `error` and its causes, which keep the step's tensors alive."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            chain += [link.__cause__, link.__context__]
