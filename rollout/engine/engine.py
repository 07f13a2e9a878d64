"""Engine: takes requests, steps, suspends, takes new weights. Synchronous, no sockets, no threads of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout.config import KVCacheManagementMode
from rollout.engine.counters import EngineTelemetry
from rollout.engine.intake import Entry, RequestIntake
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.request_book import RequestBook
from rollout.engine.state import EngineState, StateMachine
from rollout.engine.suspension import Suspension
from rollout.errors import InvalidRequestError
from rollout.kv.cache import KVCache
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.runner.model_runner import ModelRunner
from rollout.runner.weight_update import (
    NamedTensors,
    WeightUpdater,
    WeightUpdateReport,
    next_version,
)
from rollout.sampling_params import SamplingParams
from rollout.scheduling.scheduler import Schedule, Scheduler
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.version_spans import VersionSpans


class Engine:
    """The only writer of the engine state, the weights version and the request documents.

    A finished, failed or aborted request is handed out once, by `step` or `abort_request`.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: ModelRunner,
        updater: WeightUpdater,
        kv: KVCache,
        intake: RequestIntake,
        book: RequestBook,
        telemetry: EngineTelemetry,
        suspension: Suspension,
        max_kv_staleness_versions: int | None,
        weights_version: int,
    ) -> None:
        self._scheduler, self._runner, self._updater, self._kv = scheduler, runner, updater, kv
        self._intake, self._book, self._telemetry = intake, book, telemetry
        self._suspension = suspension
        self._max_kv_staleness_versions = max_kv_staleness_versions
        self._weights_version = weights_version
        self._machine = StateMachine()

    # ---- requests

    def add_request(
        self,
        prompt_tokens: Sequence[int],
        sampling_params: SamplingParams,
        request_id: int | None = None,
        priority: int = 0,
    ) -> int:
        """Queue one request and return its id. A string prompt needs a tokenizer.

        Raises InvalidRequestError for a malformed request; one that can never run here comes back
        FAILED from the next step. Raises EngineStateError once stopped.
        """
        ids = None if request_id is None else [request_id]
        return self.add_group(prompt_tokens, [sampling_params], ids, priority)[0]

    def add_group(
        self,
        prompt_tokens: Sequence[int],
        list_of_sampling_params: Sequence[SamplingParams],
        request_ids: Sequence[int] | None = None,
        priority: int = 0,
    ) -> list[int]:
        """Queue several samples of one prompt, which is prefilled once. All are queued, or none."""
        return self.add_groups([(prompt_tokens, list_of_sampling_params)], request_ids, priority)[0]

    def add_groups(
        self,
        groups: Sequence[tuple[str | Sequence[int], Sequence[SamplingParams]]],
        request_ids: Sequence[int] | None = None,
        priority: int = 0,
    ) -> list[list[int]]:
        """Queue groups of (prompt, samples' parameters), all or none. `request_ids` is for one group."""
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            self._machine.require(EngineState.RUNNING, to="add a request")
        for request_id in request_ids or ():
            if request_id in self._book:
                raise InvalidRequestError(f"request id {request_id} is in use; choose another")
        checked = [self._intake.validate(prompt, params_list) for prompt, params_list in groups]
        added = []
        for group in checked:
            entries = self._intake.enter(group, request_ids, priority, self._weights_version)
            ids = [entry.request.request_id for entry in entries]
            for entry in entries:
                self._queue(entry, group_id=ids[0] if len(ids) > 1 else None)
            added.append(ids)
        return added

    def _queue(self, entry: Entry, *, group_id: int | None) -> None:
        request, admission = entry.request, entry.admission
        self._book.open(request)
        if admission.error is not None:
            spans, version = VersionSpans(), self._weights_version
            self._book.fail(request.request_id, admission.error, "error", spans, version)
            return
        if admission.clamped is not None:
            request.add_event_error_transient(admission.clamped)
        self._scheduler.add(
            request.request_id,
            entry.tokens,
            priority=request.priority,
            group_id=group_id,
            sampling=entry.row_sampling,
            stop_rule=entry.stop_rule,
            wants_prompt_logprobs=entry.wants_prompt_logprobs,
        )

    def abort_request(self, request_id: int) -> DynamicInferenceRequestRecord:
        """End a request now, in any state; returns its record with the tokens so far."""
        if not self._book.has_ended(request_id):
            kv_spans = self._scheduler.remove(request_id)
            self._kv.retain(self._scheduler.used_blocks())
            self._book.abort(request_id, kv_spans, self._weights_version)
        return self._hand_out([request_id])[0]

    def get_record(self, request_id: int) -> DynamicInferenceRequestRecord:
        """The record of a request not handed out yet. Raises EngineStateError for any other id."""
        record = self._book[request_id]
        if self._book.has_ended(request_id):
            return record
        record.current.kv_spans = self._scheduler.kv_spans(request_id)
        record.observe_version(self._weights_version)
        return record

    def has_unfinished_requests(self) -> bool:
        """Whether a further step could bring something."""
        return len(self._book) > 0

    def _hand_out(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequestRecord]:
        records = [self._book.hand_out(request_id) for request_id in request_ids]
        num_failed = sum(record.current.failed() for record in records)
        self._telemetry.note_ended(num_finished=len(records) - num_failed, num_failed=num_failed)
        return records

    # ---- one step

    def step(self) -> list[DynamicInferenceRequestRecord]:
        """Run one forward pass; returns the records finished by it, [] when idle.

        Raises EngineStateError outside RUNNING. If the forward pass itself fails, its requests go
        back to the queue with all their tokens, and the error is raised. Records that an error kept
        from being returned come with the next step.
        """
        self._machine.require(EngineState.RUNNING, to="step")
        start = time.perf_counter()
        schedule = self._scheduler.schedule(self._weights_version)
        self._note_schedule(schedule)
        if schedule.plan is not None:
            output = self._run(schedule.plan)
            committed = self._scheduler.commit(schedule.plan, output)
            self._book.apply(committed, output)
            counts = self._scheduler.counts()
            self._telemetry.note_step(schedule.plan, time.perf_counter() - start, counts)
        return self._hand_out(self._book.ended_ids())

    def _note_schedule(self, schedule: Schedule) -> None:
        self._telemetry.note_schedule(schedule)
        self._book.note_requeued(schedule.evicted, evicted=True)
        self._book.note_paused(schedule.paused)
        self._book.note_admitted((*schedule.resumed, *schedule.admitted))

    def _run(self, plan: StepPlan) -> StepOutput:
        try:
            return self._runner.run(plan)
        except BaseException:
            self._book.note_requeued(self._scheduler.abandon(plan), evicted=False)
            raise

    # ---- states

    @property
    def state(self) -> EngineState:
        return self._machine.state

    def pause(self) -> None:
        """Stop at this step edge; requests stay as they are."""
        with self._machine.command("pause"):
            pass

    def unpause(self) -> None:
        """Let steps run again."""
        with self._machine.command("unpause"):
            pass

    def suspend(self, mode: KVCacheManagementMode | str | None = None) -> SuspendReport:
        """Give memory back; what becomes of the KV is the mode's, the config's if None.

        Legal in PAUSED, answered as done in SUSPENDED. A failure leaves PAUSED and every request.
        """
        with self._machine.command("suspend") as must_run:
            if not must_run:
                return self._suspension.nothing_suspended()
            report, requeued = self._suspension.suspend(mode)
            self._book.note_requeued(requeued, evicted=False)
        self._telemetry.note_suspend(report)
        return report

    def resume(self) -> ResumeReport:
        """Have the memory and the KV again; leads to PAUSED. Answered as done if PAUSED already."""
        with self._machine.command("resume") as must_run:
            if not must_run:
                return self._suspension.nothing_resumed()
            report = self._suspension.resume()
        self._telemetry.note_resume(report)
        return report

    def shutdown(self) -> None:
        """Stop for good, from any state; twice is fine. Unfinished requests can still be aborted."""
        if self.state is EngineState.RUNNING:
            self.pause()
        with self._machine.command("stop") as must_run:
            if must_run:
                self._kv.release()
                self._kv.retain([])

    # ---- weights

    @property
    def weights_version(self) -> int:
        return self._weights_version

    def weights_checksum(self) -> str:
        """Checksum of all weights; equal for engines that serve the same ones."""
        return self._updater.checksum()

    def set_generation_epoch(self, version: int) -> None:
        """A commit without tensors. Legal in PAUSED and SUSPENDED, for a version above the current."""
        self._require_quiet("set the generation epoch", in_flight=False)
        self._commit_version(next_version(self._weights_version, version))

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace all weights in place, or nothing: verified first, then copied at this step edge.

        `named_tensors` are (Hugging Face name, tensor) pairs or a mapping; `version` None means the
        current one + 1. Legal in PAUSED and SUSPENDED, and in RUNNING with `in_flight`. Raises
        WeightUpdateError naming the tensor at fault; weights and version are then unchanged.
        """
        self._require_quiet("update weights", in_flight=in_flight)
        start = time.perf_counter()
        new_version = next_version(self._weights_version, version)
        num_bytes, stall_seconds = self._updater.commit(self._updater.verify(named_tensors))
        self._commit_version(new_version)
        report = WeightUpdateReport(
            version=new_version,
            seconds=time.perf_counter() - start,
            stall_seconds=stall_seconds,
            num_bytes=num_bytes,
            checksum=self._updater.checksum(),
        )
        self._telemetry.note_update(report)
        return report

    def _require_quiet(self, what: str, *, in_flight: bool) -> None:
        running = (EngineState.RUNNING,) if in_flight else ()
        states = (EngineState.PAUSED, EngineState.SUSPENDED, *running)
        self._machine.require(*states, to=what)

    def _commit_version(self, version: int) -> None:
        self._weights_version = version
        if self._max_kv_staleness_versions is None:
            return
        oldest = version - self._max_kv_staleness_versions
        requeued = self._scheduler.requeue_older_than(oldest)
        self._kv.retain(self._scheduler.used_blocks())
        self._book.note_requeued(requeued, evicted=False)
        self._telemetry.note_recomputed(len(requeued))

    # ---- reports

    def stats(self) -> EngineStats:
        return self._telemetry.stats(self.state, self._weights_version, self._scheduler.counts())

    def kv_data_ptrs(self) -> dict[str, int]:
        """Address of every KV tensor, by name."""
        return self._kv.data_ptrs()
