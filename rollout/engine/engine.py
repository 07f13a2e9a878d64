"""Engine: takes requests, steps, suspends, takes new weights. Synchronous, no sockets, no threads
of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from rollout.config import KVCacheManagementMode
from rollout.engine.counters import EngineTelemetry
from rollout.engine.pipeline import StepPipeline
from rollout.engine.reports import EngineStats, ResumeReport, SuspendReport
from rollout.engine.request_book import RequestBook
from rollout.engine.request_desk import Group, RequestDesk
from rollout.engine.served_weights import ServedWeights
from rollout.engine.state import EngineState, StateMachine
from rollout.engine.suspension import Suspension
from rollout.kv.cache import KVCache
from rollout.requests.generated_tokens import GeneratedColumns
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.runner.weight_update import NamedTensors, StagedWeights, WeightUpdateReport
from rollout.sampling_params import SamplingParams
from rollout.scheduling.scheduler import Scheduler

_QUIET = (EngineState.PAUSED, EngineState.SUSPENDED)


class Engine:
    """The only writer of the engine state, the weights version and the request documents.

    A finished, failed or aborted request is handed out once, by `step` or `abort_request`.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pipeline: StepPipeline,
        kv: KVCache,
        weights: ServedWeights,
        desk: RequestDesk,
        book: RequestBook,
        telemetry: EngineTelemetry,
        suspension: Suspension,
        max_kv_staleness_versions: int | None,
    ) -> None:
        self._scheduler, self._pipeline, self._kv = scheduler, pipeline, kv
        self._weights = weights
        self._desk, self._book, self._telemetry = desk, book, telemetry
        self._suspension = suspension
        self._max_kv_staleness_versions = max_kv_staleness_versions
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
        groups: Sequence[Group],
        request_ids: Sequence[int] | None = None,
        priority: int = 0,
    ) -> list[list[int]]:
        """Queue groups of (prompt, samples' parameters), all or none. `request_ids` are those of
        all samples, group after group.
        """
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            self._machine.require(EngineState.RUNNING, to="add a request")
        return self._desk.add_groups(groups, request_ids, priority, self.weights_version)

    def add_record(self, record: DynamicInferenceRequestRecord) -> int:
        """Go on with a request that another engine began, from the tokens it has; returns its id.

        They are prefilled again; tokens, log-probs and policy versions are kept, and what is drawn
        next is what the other engine would have drawn. Raises InvalidRequestError for a record that
        has ended or does not fit, and for an id in use.
        """
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            self._machine.require(EngineState.RUNNING, to="add a request")
        return self._desk.add_record(record, self.weights_version)

    def abort_request(self, request_id: int) -> DynamicInferenceRequestRecord:
        """End a request now, in any state; returns its record with the tokens so far."""
        self._desk.abort(request_id, self.weights_version)
        self._pipeline.forget(request_id)
        return self._hand_out([request_id])[0]

    def get_record(self, request_id: int) -> DynamicInferenceRequestRecord:
        """A copy of the record of a request not handed out yet, as of now.

        Raises EngineStateError for any other id.
        """
        return self._desk.record(request_id, self.weights_version)

    def new_tokens(self, wanted: Iterable[tuple[int, int]]) -> GeneratedColumns:
        """The tokens that each running request has generated from an offset on, by (request id,
        offset); costs as many. A request without any, that has ended, or that is not in the engine
        is left out: once it has ended its tokens come with its record.
        """
        return self._book.new_tokens(wanted)

    def has_unfinished_requests(self) -> bool:
        """Whether a further step could bring something."""
        return len(self._book) > 0

    def suspects(self) -> list[int]:
        """After a step that raised: the requests that were in it, any of which may be the cause."""
        return self._pipeline.suspects() or self._scheduler.running_ids()

    def _hand_out(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequestRecord]:
        records = [self._book.hand_out(request_id) for request_id in request_ids]
        num_failed = sum(record.current.failed() for record in records)
        self._telemetry.note_ended(num_finished=len(records) - num_failed, num_failed=num_failed)
        return records

    # ---- one step

    def step(self) -> list[DynamicInferenceRequestRecord]:
        """Take in one forward pass; returns the records finished by it, [] when idle.

        If it fails, its requests go back to the queue with all their tokens and an ERROR_TRANSIENT
        event; one that fails again, and then alone, is FAILED. Raises EngineStateError outside
        RUNNING, and the error of a forward pass where the device fails without any request, too.
        Records that an error kept from being returned come with the next step.
        """
        self._machine.require(EngineState.RUNNING, to="step")
        self._weights.require_values("step")
        self._pipeline.step(self.weights_version)
        return self._hand_out(self._book.ended_ids())

    # ---- states

    @property
    def state(self) -> EngineState:
        return self._machine.state

    def pause(self) -> None:
        """Stop at this step edge; requests stay as they are.

        Records finished by a step that was on its way come with the next step.
        """
        with self._machine.command("pause"):
            self._pipeline.settle()

    def unpause(self) -> None:
        """Let steps run again. Refused while the weights' values are missing."""
        with self._machine.command("unpause") as must_run:
            if must_run:
                self._weights.require_values("unpause")
                self._suspension.resume()  # what a failed suspend may have left

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """Give the memory of `release` back: "kv_cache" as `mode` (None: the config's) says,
        "weights" after a copy to the host, or without one if `discard_weights`.

        Legal in PAUSED, and in SUSPENDED, for what is not given back yet: the rest is answered as
        done, with zero bytes. A failure leaves the state and every request.
        """
        with self._machine.command("suspend") as is_first:
            report = self._suspension.suspend(
                mode, release, discard=discard_weights, is_first=is_first
            )
        if is_first or report.bytes_released:
            self._telemetry.note_suspend(report)
        return report

    def resume(self, only: str | None = None) -> ResumeReport:
        """Have memory and contents again; leads to PAUSED. Answered as done if PAUSED already.

        `only` brings "weights" or "kv_cache" back; the engine stays SUSPENDED until all is there.
        """
        is_partial = not self._suspension.is_complete_with(only)
        if is_partial and self.state is EngineState.SUSPENDED:
            report = self._suspension.resume(only)
        else:
            with self._machine.command("resume") as must_run:
                report = self._suspension.resume()  # in PAUSED: what a failed suspend may have left
            if not must_run:
                return report
        self._telemetry.note_resume(report)
        return report

    def shutdown(self) -> None:
        """Stop for good, from any state; twice is fine. Requests can still be aborted.

        If giving the memory back fails, the engine is stopped all the same; call it again.
        """
        if self.state is EngineState.RUNNING:
            self.pause()
        with self._machine.command("stop"):
            pass
        self._kv.retain([])
        self._kv.release()

    # ---- weights

    @property
    def weights_version(self) -> int:
        return self._weights.version

    def weights_checksum(self) -> str:
        """Checksum of all weights; equal for engines that serve the same ones."""
        return self._weights.checksum()

    def set_generation_epoch(self, version: int) -> None:
        """A commit without tensors. Legal in PAUSED and SUSPENDED, above the current version."""
        self._machine.require(*_QUIET, to="set the generation epoch")
        self._weights.set_version(version)
        self._after_new_version()

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace all weights in place, or nothing: `stage_weights`, then `commit_weights`.

        Legal in PAUSED and SUSPENDED, and in RUNNING with `in_flight`.
        """
        self.check_update(version, in_flight)
        return self.commit_weights(self.stage_weights(named_tensors), version, in_flight)

    def stage_weights(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], None] = lambda: None,
        source_checksum: str = "",
    ) -> StagedWeights:
        """Verify and prepare an update; another thread may do it while steps go on, but not while
        the weights' memory is released or brought back.

        `named_tensors` is a module, whose persistent buffers count, or (Hugging Face name, tensor)
        pairs or a mapping, and must not change until the commit. Sharded tensors are gathered in
        the order of their names: a collective. `check` is called before each tensor, and may raise
        to end staging. `source_checksum`: what their publisher computed, if it did. Raises
        WeightUpdateError naming the tensor at fault.
        """
        return self._weights.stage(named_tensors, check, source_checksum)

    def commit_weights(
        self, staged: StagedWeights, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Copy a staged update in place, at this step edge, and serve it as `version`.

        `version` None means the current one + 1; it is refused unless above the current.
        """
        self.check_update(version, in_flight)
        self._pipeline.settle()
        start, stall_start = time.perf_counter(), self._stall_start(staged)
        num_bytes = self._weights.commit(staged, version)
        self._after_new_version()
        end = time.perf_counter()
        report = WeightUpdateReport(
            version=self.weights_version,
            seconds=staged.seconds + end - start,
            stall_seconds=end - stall_start,
            num_bytes=num_bytes,
            checksum=staged.checksum,
        )
        self._telemetry.note_update(report)
        return report

    def _stall_start(self, staged: StagedWeights) -> float:
        """When the last step ended, or staging began if no step has run since: requests waited
        for that, too. Now, if nothing could run.
        """
        if self.state is not EngineState.RUNNING or not self.has_unfinished_requests():
            return time.perf_counter()
        return max(self._pipeline.last_result_at, staged.started_at)

    def check_update(self, version: int | None = None, in_flight: bool = False) -> None:
        """Raise what `commit_weights` would raise now: EngineStateError or WeightUpdateError."""
        running = (EngineState.RUNNING,) if in_flight else ()
        self._machine.require(*_QUIET, *running, to="update weights")
        self._weights.require_resident("update weights")
        self._weights.check_version(version)

    def _after_new_version(self) -> None:
        self._scheduler.kv_cache_manager.begin_weights_version()
        if self._max_kv_staleness_versions is None:
            return
        oldest = self.weights_version - self._max_kv_staleness_versions
        requeued = self._scheduler.requeue_older_than(oldest)
        if self._kv.num_offloaded_bytes:
            # No block may be found later whose bytes are given up now.
            self._scheduler.kv_cache_manager.free_unused_blocks()
            self._kv.retain(self._scheduler.kv_cache_manager.used_blocks())
        self._book.note_requeued(requeued, evicted=False)
        self._telemetry.note_recomputed(len(requeued))

    # ---- reports

    @property
    def num_waiting(self) -> int:
        """Requests in the queue; `stats` says more, and takes longer."""
        return len(self._scheduler.waiting)

    def stats(self) -> EngineStats:
        counts, num_captures = self._scheduler.counts(), self._pipeline.num_graph_captures
        return self._telemetry.stats(self.state, self.weights_version, counts, num_captures)

    def kv_data_ptrs(self) -> dict[str, int]:
        """Address of every KV tensor, by name."""
        return self._kv.data_ptrs()
