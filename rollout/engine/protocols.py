"""The Protocols between an Engine and its parts: scheduler, step pipeline, executor, suspension.

Engine calls all of them, and StepPipeline calls StepExecutor. `rollout.coordinator.agent.updates`
keeps StagedUpdates until their commit. The implementations are
rollout.scheduling.scheduler.Scheduler, StepPipeline, Suspension and WorkerExecutor, with its
subclasses TensorParallelExecutor and SpmdExecutor. `rollout_vllm` has its own implementations.

All methods are called from the thread that steps, unless a docstring says otherwise. Every
implementation follows these rules, which tests/contracts/test_engine_parts.py checks:

- Every position of a request's KV has the version of the weights that wrote it. A rewritten slot
  gets the new version. Shared blocks of a prefix hit keep the versions that wrote them.
- Every token has the version of the weights at the launch of the step that sampled it.
- No step is in flight while weights are committed: the engine calls `commit_all` first.
- An update changes all weights or none. `stage_weights` makes all checks that can refuse an update.
  A commit that fails restores the old weights and version. If this restoration fails too,
  `has_values` is False.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Sized
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.config import KVCacheManagementMode
from rollout.control.reports import MemoryStatus, ResumeReport, SuspendReport
from rollout.sampling_params import SamplingParams
from rollout.scheduling.stopping import StopRule
from rollout.step.output import StepOutput
from rollout.step.plan import StepPlan
from rollout.telemetry import RankUse, SchedulerCounts
from rollout.version_spans import VersionSpans
from rollout.weights.update import NamedTensors


class KVPool(Protocol):
    """The part of the KV block pool that Engine uses."""

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        ...

    def begin_weights_version(self) -> None:
        """Hide cached prefixes that requests may not reuse under the new version of the weights."""
        ...

    def distrust(self, version: int) -> None:
        """Keep requests under later versions from matching prefixes that `version` or earlier
        versions wrote. Engine calls it if the weights of `version` are not finite."""
        ...


class SchedulerInterface(Protocol):
    """Decides which requests run in a step. Owns the queue, the rows and the KV blocks.

    A request stays in the scheduler from `add_request` until a step or `finish_request` ends it.
    """

    @property
    def kv_cache_manager(self) -> KVPool:
        """The pool of KV blocks."""
        ...

    @property
    def waiting(self) -> Sized:
        """The queue. Any thread may read its length."""
        ...

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens that a step computes."""
        ...

    @property
    def num_routing_bytes(self) -> int:
        """Bytes that the record of routed experts occupies; 0 if experts are not recorded."""
        ...

    def add_request(
        self,
        request_id: int,
        tokens: list[int],
        *,
        num_prompt: int,
        priority: int,
        group_id: int | None,
        sampling_params: SamplingParams,
        seed: int,
        stop_rule: StopRule,
        wants_prompt_logprobs: bool,
    ) -> None:
        """Queue a request. Tokens after the first `num_prompt` were generated earlier."""
        ...

    def finish_request(self, request_id: int) -> VersionSpans:
        """End a request in any phase. Returns the version that wrote the KV of each position."""
        ...

    def request_ids(self) -> Collection[int]:
        """Return the ids of all requests."""
        ...

    def running_ids(self) -> list[int]:
        """Return the ids of the requests that have rows."""
        ...

    def kv_spans(self, request_id: int) -> VersionSpans:
        """Return a copy of the versions that wrote the KV of the positions computed so far."""
        ...

    def routing(self, request_id: int) -> NDArray[np.int16] | None:
        """Return the experts of the request's first positions; None if they are not recorded."""
        ...

    def requeue_older_than(self, version: int) -> Sequence[int]:
        """Queue requests again whose oldest KV was written before `version`, and drop their KV.
        Returns the ids of these requests. Cached prefixes that old are never matched again."""
        ...

    def counts(self) -> SchedulerCounts:
        """Return the number of requests in each phase and the numbers of blocks. Any thread may
        call it."""
        ...

    def violations(self) -> list[str]:
        """Return the violated invariants of queue, rows and blocks, one sentence each."""
        ...


class PipelineInterface(Protocol):
    """Schedules and launches steps, and writes the results into the scheduler and the records. The
    requests of a failed step return to the queue with the tokens they have. An error is raised only
    if its cause is the device, a dead rank or an interrupt."""

    @property
    def num_in_flight(self) -> int:
        """Number of steps that are launched and not committed. Any thread may read it."""
        ...

    @property
    def num_graph_captures(self) -> int:
        """Number of steps captured so far; 0 where steps run eagerly."""
        ...

    @property
    def last_result_at(self) -> float:
        """End of the last step, by time.perf_counter; -inf before the first step."""
        ...

    def step(self, weights_version: int) -> None:
        """Launch the steps that may run, and commit the oldest one. Does nothing when idle."""
        ...

    def commit_all(self) -> None:
        """Wait for all steps in flight and commit them."""
        ...

    def measure_step(self, weights_version: int) -> None:
        """Time a step without requests, for `Engine.longest_step_s`."""
        ...

    def suspects(self) -> list[int]:
        """Return the ids of requests whose step failed and that no later step has cleared."""
        ...

    def remove(self, request_id: int) -> None:
        """Drop a request that was removed from the scheduler."""
        ...


class ServingWeights(Protocol):
    """The weights that an executor serves, for reading. Any thread may read `version`."""

    @property
    def version(self) -> int:
        """Version of the served weights."""
        ...

    @property
    def has_values(self) -> bool:
        """Whether the weights are one complete set: neither discarded nor partly updated."""
        ...

    @property
    def is_finite(self) -> bool:
        """Whether no weight is known to be NaN or infinite."""
        ...

    @property
    def names(self) -> list[str]:
        """The Hugging Face names of all weights, sorted."""
        ...

    def require_values(self, what: str) -> None:
        """Raise EngineStateError("cannot {what}: ...") unless `has_values` is True."""
        ...

    def require_resident(self, what: str) -> None:
        """Raise EngineStateError("cannot {what}: ...") while the weights' memory is released."""
        ...

    def data_ptrs(self) -> dict[str, int]:
        """Return the address of each weight by name; {} if the weights are in other processes."""
        ...


class StagedUpdate(Protocol):
    """A verified update that waits for its commit. Deleting the object drops the update on all
    ranks."""

    @property
    def checksum(self) -> str:
        """Checksum of the weights that the commit will serve."""
        ...

    @property
    def started_at(self) -> float:
        """Start of staging, by time.perf_counter."""
        ...

    @property
    def seconds(self) -> float:
        """Duration of staging."""
        ...


_Staged = TypeVar("_Staged", bound=StagedUpdate)


class Executor(Protocol[_Staged]):
    """Holds the model on all ranks of an engine: weights, KV memory and captured graphs."""

    @property
    def weights(self) -> ServingWeights:
        """The weights that are served."""
        ...

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> _Staged:
        """Verify and prepare an update on all ranks. The served weights do not change.

        Any thread may call it while steps run. `check` is called before each tensor; its exception
        ends the staging. `source_checksum` is the publisher's checksum, or "" if unknown. Raises
        WeightUpdateError, which names the tensor, if a tensor is missing, unknown, not finite, of
        another shape or not as announced.
        """
        ...

    def commit_weights(self, staged: _Staged, version: int | None) -> int:
        """Serve a staged update as `version` on all ranks, or on none. Returns the number of bytes
        written. `version` None means the next version. The caller has committed all steps in
        flight."""
        ...

    def set_version(self, version: int) -> None:
        """Change the version of the served weights. Raises WeightUpdateError unless `version` is
        above the current version."""
        ...

    def weights_checksum(self) -> str:
        """Return a checksum of all weights that is independent of the number of ranks."""
        ...

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksum of each named weight."""
        ...

    def warm_up(self) -> int:
        """Capture the graphs of steps in advance. Returns the number of captured graphs."""
        ...

    def rank_uses(self) -> tuple[RankUse, ...]:
        """Return the resource use of each rank, in rank order; () after the ranks have ended."""
        ...

    def kv_data_ptrs(self) -> dict[str, int]:
        """Return the address of each KV tensor by name; {} if the KV cache is released or in other
        processes."""
        ...

    def check_ranks(self) -> None:
        """Raise LockstepError if a rank has died, without running a step."""
        ...

    def close(self) -> None:
        """Release the KV cache and end the other ranks. It can be called again after an error."""
        ...


class StepExecutor(Executor[_Staged], Protocol[_Staged]):
    """An executor that runs the StepPlans of rollout.scheduling, for StepPipeline."""

    @property
    def overlaps(self) -> bool:
        """Whether the host can prepare a step while the previous one runs."""
        ...

    @property
    def num_graph_captures(self) -> int:
        """Number of steps captured so far; 0 where steps run eagerly."""
        ...

    def launch(self, plan: StepPlan) -> Callable[[], StepOutput]:
        """Start a step. Returns a function that waits for the result. At most two steps are in
        flight."""
        ...


class SuspensionInterface(Protocol):
    """Releases the memory of the KV cache and of the weights, and restores it."""

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        *,
        discard: bool,
        is_first: bool,
    ) -> SuspendReport:
        """Release those resources in `release` ("kv_cache", "weights") that are not released yet.

        `mode` applies to the KV cache; None means the config's mode. `discard` omits the copy of
        the weights to the host. `is_first` is whether the engine was not suspended before.

        Requests continue after `resume` with the tokens they have. Raises ConfigError for an
        unknown or unsupported mode, before anything has changed. After any other exception, call
        `resume` to restore everything, or retry.
        """
        ...

    def resume(self, only: str | None = None) -> ResumeReport:
        """Restore all resources, or only the resource `only`. It can be called again after an
        exception."""
        ...

    def is_complete_with(self, only: str | None) -> bool:
        """Return whether no resource stays released once `only` is restored (None: all resources).
        Raises ConfigError for an unknown resource."""
        ...

    def drop_unused_copies(self) -> None:
        """Free the host copies of KV blocks that no request uses."""
        ...

    def status(self) -> MemoryStatus:
        """Return how much KV cache and weight memory is resident, on the host or released."""
        ...
