"""Engine: requests, steps, suspend and resume, weight updates.

It is synchronous, without sockets and threads. One thread calls it, unless a method allows others.
Used by people who step an engine by hand, by `rollout.apis.in_process` (for LLM and ThreadedLLM),
and by `rollout.coordinator.agent`. `rollout.engine.build` and `rollout_vllm.engine` derive their
engines from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollout.config import KVCacheManagementMode
from rollout.control.commands import Command, ControlledEngine, R
from rollout.control.reports import (
    EngineStats,
    MemoryStatus,
    ResumeReport,
    SuspendReport,
    WeightChecksums,
    WeightUpdateReport,
)
from rollout.control.state import (
    PAUSE,
    QUIET,
    RESUME,
    SET_GENERATION_EPOCH,
    STOP,
    SUSPEND,
    UNPAUSE,
    EngineState,
    StateMachine,
)
from rollout.engine.counters import EngineCounters
from rollout.engine.guard import CallGuard
from rollout.engine.input_processor import Group, InputProcessor, ProcessedRequest
from rollout.engine.output_processor import OutputProcessor
from rollout.engine.protocols import (
    Executor,
    PipelineInterface,
    SchedulerInterface,
    StagedUpdate,
    SuspensionInterface,
)
from rollout.errors import IntegrityError, RequestAbortedError
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.token_runs import TokenRuns
from rollout.sampling_params import SamplingParams
from rollout.text import Prompt
from rollout.version_spans import VersionSpans
from rollout.weights.source import WeightsSource
from rollout.weights.update import NamedTensors
from rollout.weights.version import next_version

logger = logging.getLogger(__name__)
_CHECKSUMS_PER_PAGE = 2048  # fits a message between processes, also with the longest names


class Engine(ControlledEngine):
    """Connects the parts of an engine. It is the only writer of the engine's state.

    `inputs` checks a request, the scheduler queues it, and `outputs` keeps its record. `step` or
    `abort_request` returns the record of an ended request once. A Command of
    rollout.control.commands calls the methods that ControlledEngine declares.

    weight_fetchers: the engine's own functions to fetch weights, by the `kind` of the source.
    """

    weight_fetchers: Mapping[str, Callable[[WeightsSource], NamedTensors]] = MappingProxyType({})

    def __init__(
        self,
        *,
        inputs: InputProcessor,
        scheduler: SchedulerInterface,
        outputs: OutputProcessor,
        pipeline: PipelineInterface,
        executor: Executor[Any],
        suspension: SuspensionInterface,
        counters: EngineCounters,
        guard: CallGuard,
        max_kv_staleness_versions: int | None,
    ) -> None:
        self._inputs, self._scheduler, self._outputs = inputs, scheduler, outputs
        self.seed = inputs.seed  # requests without a seed derive theirs from it
        self._pipeline, self._executor, self._weights = pipeline, executor, executor.weights
        self._suspension, self._counters, self._guard = suspension, counters, guard
        self._max_kv_staleness_versions = max_kv_staleness_versions
        self._machine = StateMachine()

    # ---- requests

    def add_request(
        self,
        prompt_tokens: Prompt,
        sampling_params: SamplingParams,
        request_id: int | None = None,
        priority: int = 0,
    ) -> int:
        """Queue one request and return its id. A text prompt needs a tokenizer. A request that can
        never run here is returned FAILED by the next step. Raises InvalidRequestError for a
        malformed request, and EngineStateError after `shutdown`."""
        ids = None if request_id is None else [request_id]
        return self.add_group(prompt_tokens, [sampling_params], ids, priority)[0]

    def add_group(
        self,
        prompt_tokens: Prompt,
        list_of_sampling_params: Sequence[SamplingParams],
        request_ids: Sequence[int] | None = None,
        priority: int = 0,
    ) -> list[int]:
        """Queue several samples of one prompt, which is prefilled once. Returns the request ids."""
        return self.add_groups([(prompt_tokens, list_of_sampling_params)], request_ids, priority)[0]

    def add_groups(
        self,
        groups: Sequence[Group],
        request_ids: Sequence[int] | None = None,
        priority: int = 0,
    ) -> list[list[int]]:
        """Queue groups of (prompt, parameters of each sample), all or none. Returns their request
        ids. `request_ids` has an id for each sample, group after group; None chooses free ids.
        Raises the errors of `add_request`."""
        self._require_not_stopped()
        processed = self._inputs.process_groups(
            groups, request_ids, priority, self.weights_version, in_use=self._outputs
        )
        with self._guard.change("add_groups"):
            return [[self._queue(request) for request in group] for group in processed]

    def add_record(self, record: DynamicInferenceRequestRecord) -> int:
        """Continue a request that another engine began, from the tokens it has. Returns its request
        id.

        The tokens so far are prefilled again. They keep their log-probs and policy versions. The
        next tokens are the ones that the other engine would have sampled. The record belongs to
        this engine afterwards. Raises InvalidRequestError for a record that has ended or does not
        fit, and for an id in use.
        """
        self._require_not_stopped()
        processed = self._inputs.process_record(record, in_use=self._outputs)
        with self._guard.change("add_record"):
            return self._queue(processed)

    def _require_not_stopped(self) -> None:
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            self._machine.require(EngineState.RUNNING, *QUIET, to="add a request")

    def _queue(self, request: ProcessedRequest) -> int:
        record, admission = request.record, request.admission
        request_id = record.request_id
        self._outputs.add_request(record)
        if admission.error is not None:
            self._outputs.fail(
                request_id, admission.error, "error", VersionSpans(), self.weights_version
            )
            return request_id
        if admission.clamped is not None:
            self._outputs.add_transient_error([request_id], admission.clamped)
        self._scheduler.add_request(
            request_id,
            request.tokens,
            num_prompt=request.num_prompt,
            priority=record.current.priority,
            group_id=request.group_id,
            sampling_params=request.sampling_params,
            seed=request.seed,
            stop_rule=request.stop_rule,
            wants_prompt_logprobs=request.wants_prompt_logprobs,
        )
        return request_id

    def abort_request(self, request_id: int) -> DynamicInferenceRequestRecord:
        """End a request now, in any state of the engine. Returns its record with the tokens so far.

        The request's KV blocks are freed on the device and on the host. A request that has already
        ended is returned as it ended. Raises EngineStateError for a request that is not in the
        engine.
        """
        has_ended = self._outputs.has_ended(request_id)
        with self._guard.change("abort_request"):
            if not has_ended:
                kv_spans = self._scheduler.finish_request(request_id)
                self._suspension.drop_unused_copies()
                error = RequestAbortedError(f"request {request_id} was aborted")
                self._outputs.fail(request_id, error, "abort", kv_spans, self.weights_version)
            self._pipeline.remove(request_id)
        return self._take_ended([request_id])[0]

    def get_record(self, request_id: int) -> DynamicInferenceRequestRecord:
        """Return a copy of a request's record with the tokens so far. The request continues. Raises
        EngineStateError for an unknown id, and after the record itself was returned."""
        has_ended = self._outputs.has_ended(request_id)
        if has_ended:
            return self._outputs.copy_of(request_id, None, self.weights_version)
        kv_spans = self._scheduler.kv_spans(request_id)
        routing = self._scheduler.routing(request_id)
        return self._outputs.copy_of(request_id, kv_spans, self.weights_version, routing)

    def new_tokens(self, wanted: Iterable[tuple[int, int]]) -> TokenRuns:
        """Return the tokens that running requests have generated, from an offset on. `wanted` has
        (request id, offset) pairs. Requests without new tokens, unknown requests and ended requests
        are left out. The cost depends only on the number of new tokens."""
        return self._outputs.new_tokens(wanted)

    def request_ids(self) -> list[int]:
        """Return the ids of requests whose records were not returned yet, unfinished requests
        first."""
        return self._outputs.request_ids()

    def has_unfinished_requests(self) -> bool:
        """Return whether any request has not ended, or has a record that was not returned yet."""
        return len(self._outputs) > 0

    @property
    def is_broken(self) -> bool:
        """Whether an exception has stopped a call halfway, so that every later call is refused."""
        return self._guard.is_broken

    def suspects(self) -> list[int]:
        """Return the ids of requests whose step failed and that no later step has cleared. Returns
        the ids of all running requests if there are no such requests. An engine process reports
        these ids if the engine fails."""
        return self._pipeline.suspects() or self._scheduler.running_ids()

    def _take_ended(self, request_ids: Sequence[int]) -> list[DynamicInferenceRequestRecord]:
        """Count and return records of ended requests, and drop them unless an exception occurs."""
        records = self._outputs.ended(request_ids)
        try:
            for record in records:
                self._counters.add_ended(record)
            self._outputs.drop_ended(request_ids)
            return records
        except BaseException:
            self._outputs.keep_ended(records)
            raise

    # ---- one step

    def step(self) -> list[DynamicInferenceRequestRecord]:
        """Run one forward pass. Returns the records of requests that ended; [] when idle.

        If the pass fails, its requests return to the queue with all their tokens and an
        ERROR_TRANSIENT event. A request that later fails alone is returned FAILED. If an error
        prevents the return of records, the next step returns them.

        Raises EngineStateError outside RUNNING, or if the weights are discarded or partly updated.
        Raises LockstepError if a rank has died. Raises the error of a forward pass if a pass
        without requests fails as well.
        """
        # Tested inline, because two calls that almost never raise cost time in each step.
        if self._machine.state is not EngineState.RUNNING:
            self._machine.require(EngineState.RUNNING, to="step")
        if not self._weights.has_values:
            self._weights.require_values("step")
        self._pipeline.step(self.weights_version)
        return self._take_ended(self._outputs.ended_ids())

    def check_ranks(self) -> None:
        """Raise LockstepError if a rank has died. The thread that steps calls it while the engine
        is idle."""
        self._executor.check_ranks()

    # ---- control calls

    def do(self, command: Command[R]) -> R:
        """Run a command between two steps. Returns the result of the command. Raises the errors of
        the method that the command calls. Raises EngineStateError, which lists the legal commands,
        if the command is illegal in the current state."""
        self._machine.require_legal(command.transition)
        return command.run(self)

    @property
    def state(self) -> EngineState:
        """The current state. Transient states such as SUSPENDING are visible only while a command
        runs."""
        return self._machine.state

    def pause(self) -> None:
        """Commit the steps in flight and change to PAUSED. Unfinished requests stay. The records of
        requests that finish in these steps are returned by the first step after `unpause`."""
        with self._machine.command(PAUSE):
            self._pipeline.commit_all()

    def unpause(self) -> None:
        """Change to RUNNING. Raises EngineStateError while the weights are discarded or partly
        updated."""
        with self._machine.command(UNPAUSE) as must_run:
            if must_run:
                self._weights.require_values("unpause")
                self._suspension.resume()  # a failed suspend may have released memory

    def warm_up(self) -> int:
        """Capture the graphs of steps in advance. Returns the number of captured graphs, 0 on a
        CPU. Legal in RUNNING and PAUSED."""
        self._machine.require(EngineState.RUNNING, EngineState.PAUSED, to="warm up")
        self._pipeline.commit_all()
        return self._executor.warm_up()

    def measure_step(self) -> None:
        """Run and time a step of one token without any request, for `longest_step_s`. Legal in
        RUNNING and PAUSED. Raises EngineStateError while the weights are discarded or partly
        updated."""
        self._machine.require(EngineState.RUNNING, EngineState.PAUSED, to="measure a step")
        self._weights.require_values("measure a step")
        self._pipeline.commit_all()
        self._pipeline.measure_step(self.weights_version)

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """Release the memory of the resources in `release`.

        "kv_cache" is released under `mode`; None means the config's mode. "weights" are copied to
        the host first, unless `discard_weights`. Legal in PAUSED, and in SUSPENDED to release a
        further resource. A resource that is already released is reported with zero bytes.

        Raises ConfigError for an unknown resource or mode. After any error the state is as before
        and no request has ended. The next `resume`, `unpause` or `suspend` then first restores what
        was released.
        """
        with (
            self._guard.change("suspend"),
            self._guard.undoing(),
            self._machine.command(SUSPEND) as is_first,
        ):
            report = self._suspension.suspend(
                mode, release, discard=discard_weights, is_first=is_first
            )
        if is_first or report.bytes_released:
            self._counters.add_suspend(report)
        return report

    def resume(self, only: str | None = None) -> ResumeReport:
        """Restore memory and contents, and change to PAUSED.

        `only` is the one resource to restore, "weights" or "kv_cache". The engine stays SUSPENDED
        until both resources are restored. In PAUSED, `resume` restores what a failed suspend has
        released. Raises ConfigError for an unknown resource.
        """
        with self._guard.change("resume"), self._guard.undoing():
            is_partial = not self._suspension.is_complete_with(only)
            if is_partial and self.state is EngineState.SUSPENDED:
                report = self._suspension.resume(only)
            else:
                with self._machine.command(RESUME) as must_run:
                    report = self._suspension.resume()  # in PAUSED: after a failed suspend
                if not must_run:
                    return report
        self._counters.add_resume(report)
        return report

    def shutdown(self) -> None:
        """Stop for good, from any state. It may be called twice. Requests can still be aborted. An
        error of a step in flight is logged. If releasing the memory fails, the engine is stopped
        nevertheless, and `shutdown` can be called again."""
        if self.state is EngineState.RUNNING:
            with self._machine.command(PAUSE):
                try:
                    self._pipeline.commit_all()
                except Exception:
                    # The pipeline has queued the step's requests again; a stop must not depend on
                    # a broken device.
                    logger.exception("a step in flight failed; the engine stops all the same")
        with self._machine.command(STOP):
            pass
        self._executor.close()

    # ---- weights

    @property
    def weights_version(self) -> int:
        """Version of the weights that are served now."""
        return self._weights.version

    def weights_checksum(self) -> str:
        """Return a checksum of all weights, which is equal for engines that serve equal weights."""
        return self._executor.weights_checksum()

    def weight_checksums(self, start: int = 0) -> WeightChecksums:
        """Return the checksums of at most 2,048 weights, sorted by name, from index `start` on.
        Equal values of one dtype have equal checksums on every device and with every sharding.
        Raises EngineStateError while the weights are released or discarded."""
        names = self._weights.names
        return WeightChecksums(
            checksums=self._executor.weight_checksums(names[start : start + _CHECKSUMS_PER_PAGE]),
            num_weights=len(names),
            version=self.weights_version,
        )

    def set_generation_epoch(self, version: int) -> None:
        """Change the version of the served weights to `version`, without new tensors. Legal in
        PAUSED and SUSPENDED. Raises WeightUpdateError unless `version` is above the current
        version. Raises EngineStateError while the weights are discarded or partly updated."""
        self._machine.require_legal(SET_GENERATION_EPOCH)
        with self._guard.change("set_generation_epoch"):
            with self._guard.undoing():
                self._executor.set_version(version)
            self._after_new_version()

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Replace all weights in place, or none. Calls `stage_weights` and `commit_weights`, and
        raises their errors. Legal in PAUSED and SUSPENDED, and in RUNNING with `in_flight`."""
        self.check_update(version, in_flight)
        return self.commit_weights(self.stage_weights(named_tensors), version, in_flight)

    def stage_weights(
        self,
        named_tensors: NamedTensors,
        check: Callable[[], None] = lambda: None,
        source_checksum: str = "",
    ) -> StagedUpdate:
        """Verify and prepare an update. The served weights do not change.

        `named_tensors` is a module, including its persistent buffers, or a mapping or pairs of
        (Hugging Face name, tensor). The tensors must not change until the commit. Sharded tensors
        are gathered in the order of their names, which is a collective. `check` is called before
        each tensor; its exception ends the staging. `source_checksum` is the publisher's checksum,
        or "" if unknown.

        Another thread may call it while steps run, but not while the weights' memory is being
        released or restored. Raises WeightUpdateError, which names the tensor at fault.
        """
        staged: StagedUpdate = self._executor.stage_weights(named_tensors, check, source_checksum)
        return staged

    def commit_weights(
        self, staged: StagedUpdate, version: int | None = None, in_flight: bool = False
    ) -> WeightUpdateReport:
        """Commit the steps in flight, copy a staged update in place, and serve it as `version`.

        `version` None means the current version + 1. Raises EngineStateError if an update is
        illegal now. Raises WeightUpdateError if `version` is not above the current version, or if
        copying fails. After an error the old weights are served, unless restoring them failed too.
        """
        self.check_update(version, in_flight)
        self._pipeline.commit_all()
        if not self._weights.is_finite:
            self._scheduler.kv_cache_manager.distrust(self.weights_version)
        start, stall_start = time.perf_counter(), self._stall_start(staged)
        with self._guard.change("commit_weights"):
            with self._guard.undoing():
                num_bytes = self._executor.commit_weights(staged, version)
            self._after_new_version()
        end = time.perf_counter()
        report = WeightUpdateReport(
            version=self.weights_version,
            seconds=staged.seconds + end - start,
            stall_seconds=end - stall_start,
            num_bytes=num_bytes,
            checksum=staged.checksum,
        )
        self._counters.add_update(report)
        return report

    def _stall_start(self, staged: StagedUpdate) -> float:
        """Return the time at which requests began to wait for this update, by time.perf_counter.
        The time is the end of the last step, or the start of staging if that was later. It is the
        current time if no request could run."""
        if self.state is not EngineState.RUNNING or not self.has_unfinished_requests():
            return time.perf_counter()
        return max(self._pipeline.last_result_at, staged.started_at)

    def check_update(self, version: int | None = None, in_flight: bool = False) -> None:
        """Raise the EngineStateError or WeightUpdateError that `commit_weights` would raise now."""
        self._machine.require_update(in_flight=in_flight)
        self._weights.require_resident("update weights")
        next_version(self.weights_version, version)

    def _after_new_version(self) -> None:
        """Hide cached prefixes that are too old, and queue requests again whose KV is too old."""
        self._scheduler.kv_cache_manager.begin_weights_version()
        if self._max_kv_staleness_versions is None:
            return
        oldest = self.weights_version - self._max_kv_staleness_versions
        requeued = self._scheduler.requeue_older_than(oldest)
        self._suspension.drop_unused_copies()
        self._outputs.requeue(requeued)
        self._counters.add_recomputed(len(requeued))

    # ---- reports

    def check_integrity(self, *, may_be_in_flight: bool = False) -> None:
        """Raise IntegrityError, listing all violations, if an invariant between two calls does not
        hold.

        The checks change nothing and take O(requests + blocks) time:

        - The user count of a block is the number of block tables that name it. Every block is free,
          cached or in use.
        - Every request waits or has a row of its own. Its blocks cover its computed tokens.
        - Every position of its KV and every generated token has a version.
        - No step is in flight, unless `may_be_in_flight`.
        - No memory is released while steps may run.
        """
        found = [*self._scheduler.violations(), *self._outputs.violations()]
        recorded, scheduled = self._outputs.unfinished_ids(), self._scheduler.request_ids()
        if single := sorted({*recorded} ^ {*scheduled}):
            found.append(f"requests {single} are in only one of scheduler and records")
        if self.num_steps_in_flight and not may_be_in_flight:
            found.append(f"{self.num_steps_in_flight} steps are in flight")
        missing = self._suspension.status().to_restore
        if missing and self.state is EngineState.RUNNING:
            found.append(f"the engine runs, and {list(missing)} are released")
        if self.is_broken:
            found.append("a call was stopped halfway")
        if found:
            raise IntegrityError("the engine is inconsistent: " + "; ".join(found))

    @property
    def shared_settings(self) -> dict[str, str]:
        """The settings that all engines of a fleet must share, as texts by name. Subclasses
        implement it; Engine itself raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} does not implement shared_settings")

    def describe(self) -> dict[str, dict[str, str]]:
        """Return what `rollout explain` shows of an engine of another package: texts by title and
        name. Engine itself returns {}."""
        return {}

    @property
    def block_size_tokens(self) -> int:
        """Tokens of a KV block."""
        return self._scheduler.kv_cache_manager.block_size

    @property
    def num_waiting(self) -> int:
        """Number of queued requests. It is cheaper to read than `stats`."""
        return len(self._scheduler.waiting)

    @property
    def num_steps_in_flight(self) -> int:
        """Number of steps that are launched and not committed. Between two calls of `step` it is
        above 0 only with async scheduling."""
        return self._pipeline.num_in_flight

    @property
    def longest_step_s(self) -> float:
        """Upper bound, in seconds, for a step of `max_tokens`; 0 if no step was measured. Any
        thread may read it."""
        return self._counters.step_times.longest_s(self._scheduler.max_tokens)

    def stats(self, *, of_ranks: bool = True) -> EngineStats:
        """Return the current numbers of requests and blocks, and the counters since the start. Only
        the thread that steps may call it. If `of_ranks` is False, any thread may call it, and
        `ranks` of the result is empty."""
        counts, num_captures = self._scheduler.counts(), self._pipeline.num_graph_captures
        return self._counters.stats(
            *(self.state, self.weights_version, counts, num_captures),
            max_sequence_length=self._inputs.max_sequence_length,
            block_size_tokens=self.block_size_tokens,
            ranks=self._executor.rank_uses() if of_ranks else (),
            routing_bytes=self._scheduler.num_routing_bytes,
        )

    def kv_data_ptrs(self) -> dict[str, int]:
        """Return the address of each KV tensor by name; {} if the KV cache is released or in other
        processes."""
        return self._executor.kv_data_ptrs()

    def weight_data_ptrs(self) -> dict[str, int]:
        """Return the address of each weight by its Hugging Face name; {} if in other processes."""
        return self._weights.data_ptrs()

    def memory_status(self) -> MemoryStatus:
        """Return how much KV cache and weight memory is resident, on the host or released."""
        return self._suspension.status()
