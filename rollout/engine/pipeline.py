"""StepPipeline: launches plans and takes in their results, in the same order."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable

from rollout.engine.counters import EngineTelemetry
from rollout.engine.fault_isolation import FaultIsolation, drop_frames, scratch_plans
from rollout.engine.request_book import RequestBook
from rollout.runner.model_runner import ModelRunner
from rollout.scheduling.output import SchedulerOutput
from rollout.scheduling.scheduler import Scheduler
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan

logger = logging.getLogger(__name__)


class StepPipeline:
    """One plan in flight, or two where the device lets the host run ahead: the next step is then
    scheduled and launched before the result of the one that runs is known.

    A forward pass that raises sends the requests of the plans in flight back to the queue, with the
    tokens they have. If they fail again they run alone, one after the other. One that fails alone
    is failed by its error, if a step without any request succeeds then; if that fails too, the
    device is at fault: the error is raised, and no request is failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        book: RequestBook,
        telemetry: EngineTelemetry,
    ) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._book, self._telemetry = book, telemetry
        self._faults = FaultIsolation()
        self._in_flight: deque[tuple[StepPlan, Callable[[], StepOutput]]] = deque()
        self.last_result_at = -math.inf  # of time.perf_counter

    @property
    def num_graph_captures(self) -> int:
        return self._runner.num_graph_captures

    def step(self, weights_version: int) -> None:
        """Launch what may run, then take in the oldest result. Nothing happens when idle.

        A failed step is logged. Raises its error if it is no request's.
        """
        start = time.perf_counter()
        runs_ahead = self._runner.overlaps and self._faults.next_alone() is None
        depth = 2 if runs_ahead else 1
        while len(self._in_flight) < depth and self._launch(weights_version):
            pass
        if self._in_flight:
            self._take_in(start)
        if self._scheduler.is_idle:
            self.settle()  # rows computed ahead for requests that have ended meanwhile

    def settle(self) -> None:
        """Take in all results, so that no plan is in flight."""
        while self._in_flight:
            self._take_in(time.perf_counter())

    def suspects(self) -> list[int]:
        """Requests of failed forward passes that have not sampled enough since to be cleared."""
        return self._faults.suspects()

    def forget(self, request_id: int) -> None:
        """The request was taken from the scheduler."""
        self._faults.forget(request_id)

    def _launch(self, weights_version: int) -> bool:
        alone = self._faults.next_alone()
        if alone is None:
            schedule = self._scheduler.schedule(weights_version)
        else:
            schedule = self._scheduler.schedule_alone(alone, weights_version)
        self._note_schedule(schedule)
        if schedule.plan is None:
            return False
        try:
            self._in_flight.append((schedule.plan, self._runner.launch(schedule.plan)))
        except BaseException as error:
            self._recover(error, weights_version)
            return False
        return True

    def _take_in(self, start: float) -> None:
        plan, fetch = self._in_flight[0]
        try:
            output = fetch()
        except BaseException as error:
            self._recover(error, plan.weights_version)
            return
        self._in_flight.popleft()
        committed = self._scheduler.update_from_output(plan, output)
        self._book.apply(committed, output)
        self._faults.add_tokens(committed.request_ids)
        for finished in committed.finished:
            self._faults.forget(finished.request_id)
        self.last_result_at = time.perf_counter()
        seconds = self.last_result_at - start
        self._telemetry.note_step(plan, seconds, self._scheduler.counts())

    def _note_schedule(self, schedule: SchedulerOutput) -> None:
        self._telemetry.note_schedule(schedule)
        self._book.note_requeued(schedule.preempted, evicted=True)
        self._book.note_paused(schedule.paused)
        self._book.note_admitted((*schedule.resumed, *schedule.admitted))

    # ---- a forward pass that failed

    def _recover(self, error: BaseException, weights_version: int) -> None:
        """Requests of the plans in flight go back to the queue with the tokens they have.

        A request whose own fault it is ends. Raises `error` if it is no request's.
        """
        self._in_flight.clear()
        requeued = self._scheduler.abandon()
        self._book.note_requeued(requeued, evicted=False)
        self._telemetry.note_failed_step()
        if not isinstance(error, Exception):
            raise error
        culprit = self._faults.add_failure(requeued)
        if culprit is None:
            logger.warning("a step failed; its requests are queued again", exc_info=error)
        elif not self._can_step_without_requests(weights_version):
            raise error
        else:
            logger.error("request %d is failed: it fails alone", culprit, exc_info=error)
        drop_frames(error)
        if culprit is None:
            self._book.note_transient_error(requeued, error)
            return
        self._faults.forget(culprit)
        kv_spans = self._scheduler.finish_request(culprit)
        self._book.fail(culprit, error, "error", kv_spans, weights_version)

    def _can_step_without_requests(self, weights_version: int) -> bool:
        try:
            for plan in scratch_plans(weights_version):
                self._runner.launch(plan)()
        except Exception:
            logger.exception("a step without any request fails as well: the device is at fault")
            return False
        return True
