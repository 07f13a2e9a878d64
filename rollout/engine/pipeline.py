"""StepPipeline: launches plans and takes in their results, in the same order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rollout.engine.counters import EngineTelemetry
from rollout.engine.request_book import RequestBook
from rollout.runner.model_runner import ModelRunner
from rollout.scheduling.scheduler import Schedule, Scheduler
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan


class StepPipeline:
    """One plan in flight, or two where the device lets the host run ahead: the next step is then
    scheduled and launched before the result of the one that runs is known.
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
        self._in_flight: deque[tuple[StepPlan, Callable[[], StepOutput]]] = deque()

    @property
    def num_graph_captures(self) -> int:
        return self._runner.num_graph_captures

    def step(self, weights_version: int) -> None:
        """Launch what may run, then take in the oldest result. Nothing happens when idle."""
        start = time.perf_counter()
        depth = 2 if self._runner.overlaps else 1
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

    def _launch(self, weights_version: int) -> bool:
        schedule = self._scheduler.schedule(weights_version)
        self._note_schedule(schedule)
        if schedule.plan is None:
            return False
        try:
            self._in_flight.append((schedule.plan, self._runner.launch(schedule.plan)))
        except BaseException:
            self._abandon()
            raise
        return True

    def _take_in(self, start: float) -> None:
        plan, fetch = self._in_flight[0]
        try:
            output = fetch()
        except BaseException:
            self._abandon()
            raise
        self._in_flight.popleft()
        self._book.apply(self._scheduler.commit(plan, output), output)
        seconds = time.perf_counter() - start
        self._telemetry.note_step(plan, seconds, self._scheduler.counts())

    def _note_schedule(self, schedule: Schedule) -> None:
        self._telemetry.note_schedule(schedule)
        self._book.note_requeued(schedule.evicted, evicted=True)
        self._book.note_paused(schedule.paused)
        self._book.note_admitted((*schedule.resumed, *schedule.admitted))

    def _abandon(self) -> None:
        """Requests of the plans in flight go back to the queue with the tokens they have."""
        self._in_flight.clear()
        self._book.note_requeued(self._scheduler.abandon(), evicted=False)
