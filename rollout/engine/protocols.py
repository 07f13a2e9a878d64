"""The parts of an Engine as Protocols: scheduler, step pipeline, model executor, suspension.

Engine is written against all of them, StepPipeline against StepExecutor. Engine itself has what all
implementations share: requests and their records, states, the order of calls in a weight update,
counters. The implementations here are rollout.scheduling.scheduler.Scheduler, StepPipeline,
WorkerExecutor (with TensorParallelExecutor and SpmdExecutor) and Suspension; `rollout.engine.build`
connects these objects. Another model runner replaces the executor and the suspension. An engine
with another scheduler, such as vLLM, replaces all four. `rollout.coordinator.agent.updates` keeps
StagedUpdates.

All methods are called from the thread that steps, except where they say otherwise. Rules of all
implementations, which tests/contracts/test_engine_parts.py checks:

- Every position of a request's KV has the version of the weights that wrote it. A rewritten slot
  has the new version. A prefix hit has the versions under which the shared blocks were written.
- Every token has the version of the weights that sampled it: the version at the launch of its step,
  not at the reading of its result.
- No step is in flight while weights are committed: the engine calls `commit_all` before.
- An update changes all weights or none. Everything that can be refused is refused by
  `stage_weights`. A commit that fails restores the old weights and version. If the restoration
  fails too, `has_values` is False.
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
        """Hide cached prefixes written by `version` or earlier from requests under later versions.

        Called because the weights of `version` are not finite.
        """
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
        """Bytes of the record of routed experts; 0 if there is none."""
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
        """Queue a request. Tokens beyond the first `num_prompt` were generated before."""
        ...

    def finish_request(self, request_id: int) -> VersionSpans:
        """End a request in any phase. Returns the version that wrote each position's KV."""
        ...

    def request_ids(self) -> Collection[int]:
        """Return the ids of all requests."""
        ...

    def running_ids(self) -> list[int]:
        """Return the ids of the requests that have rows."""
        ...

    def kv_spans(self, request_id: int) -> VersionSpans:
        """Return a copy of the versions that wrote the KV of the request's positions so far."""
        ...

    def routing(self, request_id: int) -> NDArray[np.int16] | None:
        """Return the experts of the request's first positions; None if they are not recorded."""
        ...

    def requeue_older_than(self, version: int) -> Sequence[int]:
        """Drop the KV of requests whose oldest KV was written before `version`, and queue them
        again.

        Returns their ids. Cached prefixes with KV that old are never matched again either.
        """
        ...

    def counts(self) -> SchedulerCounts:
        """Return the numbers of requests by phase and of blocks. Any thread may call it."""
        ...

    def violations(self) -> list[str]:
        """Return the invariants of queue, rows and blocks that do not hold, one sentence each."""
        ...


class PipelineInterface(Protocol):
    """Runs steps: schedules, launches, and writes results into scheduler and records.

    The requests of a failed step go back to the queue with the tokens they have. An error is raised
    only if the device, a dead rank or an interrupt is its cause.
    """

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
        """Wait for all steps in flight and commit them: none is in flight afterwards."""
        ...

    def measure_step(self, weights_version: int) -> None:
        """Time a step without requests, for the engine's `longest_step_s`."""
        ...

    def suspects(self) -> list[int]:
        """Return the ids of requests whose step failed and that no later step has cleared."""
        ...

    def remove(self, request_id: int) -> None:
        """Drop a request that was removed from the scheduler."""
        ...


class ServingWeights(Protocol):
    """The weights that an executor serves, read-only. Any thread may read the version."""

    @property
    def version(self) -> int:
        """The version that is served."""
        ...

    @property
    def has_values(self) -> bool:
        """Whether the weights are one complete set: neither discarded nor half updated."""
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
        """Raise EngineStateError, "cannot {what}: ...", unless `has_values`."""
        ...

    def require_resident(self, what: str) -> None:
        """Raise EngineStateError, "cannot {what}: ...", while the memory is released."""
        ...

    def data_ptrs(self) -> dict[str, int]:
        """Return the address of each weight by name; {} where weights lie in other processes."""
        ...


class StagedUpdate(Protocol):
    """A verified update that waits for its commit. Deleting it drops the update on all ranks."""

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
    """Holds the model on all ranks of an engine: weights, KV memory, captured graphs."""

    @property
    def weights(self) -> ServingWeights:
        """The weights that are served."""
        ...

    def stage_weights(
        self, named_tensors: NamedTensors, check: Callable[[], None], source_checksum: str
    ) -> _Staged:
        """Verify and prepare an update on all ranks. The served weights do not change.

        Any thread may call it, while steps run. `check` is called before each tensor, and may raise
        to cancel. `source_checksum` is the publisher's, "" if unknown. Raises WeightUpdateError
        that names the tensor: missing, unknown, of another shape, not finite, not as announced.
        """
        ...

    def commit_weights(self, staged: _Staged, version: int | None) -> int:
        """Serve a staged update as `version` (None: the next one) on all ranks, or on none.

        Returns the number of bytes written. The caller has committed all steps in flight.
        """
        ...

    def set_version(self, version: int) -> None:
        """Change the version of the served weights to `version`. Raises WeightUpdateError unless it
        is above the current version."""
        ...

    def weights_checksum(self) -> str:
        """Return a checksum of all weights, which does not depend on the number of ranks."""
        ...

    def weight_checksums(self, names: Sequence[str]) -> dict[str, str]:
        """Return the checksum of each of these weights by its name."""
        ...

    def warm_up(self) -> int:
        """Capture the graphs of steps before requests need them. Returns their number."""
        ...

    def rank_uses(self) -> tuple[RankUse, ...]:
        """Return the resource use of each rank, in rank order; () once the ranks have ended."""
        ...

    def kv_data_ptrs(self) -> dict[str, int]:
        """Return the address of each KV tensor by name; {} while released or in other processes."""
        ...

    def check_ranks(self) -> None:
        """Raise LockstepError if a rank has died, without running a step."""
        ...

    def close(self) -> None:
        """Release the KV cache and end the other ranks. May be called again if it fails."""
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
        """Start a step. Returns a function that waits for its result. At most two are in flight."""
        ...


class SuspensionInterface(Protocol):
    """Releases the memory of the KV cache and of the weights, and restores it.

    An unknown or unsupported mode raises a ConfigError that names it; nothing has changed then.
    """

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None,
        release: Sequence[str],
        *,
        discard: bool,
        is_first: bool,
    ) -> SuspendReport:
        """Release the resources in `release` ("kv_cache", "weights") that are not released yet, the
        KV cache under `mode` (None: the config's). `discard`: do not copy the weights to the host.
        `is_first`: the engine was not suspended.

        Requests go on after `resume` with the tokens they have. After an exception `resume`
        restores everything, and a retry is legal.
        """
        ...

    def resume(self, only: str | None = None) -> ResumeReport:
        """Restore all resources, or `only` one. May be called again if it fails."""
        ...

    def is_complete_with(self, only: str | None) -> bool:
        """Return whether restoring `only` (None: all) leaves no resource released. Raises
        ConfigError for an unknown resource."""
        ...

    def drop_unused_copies(self) -> None:
        """Free the host copies of KV blocks that no request uses any more."""
        ...

    def status(self) -> MemoryStatus:
        """Return which memory of KV cache and weights is resident, on the host, or released."""
        ...
