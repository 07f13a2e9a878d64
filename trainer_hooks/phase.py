"""generation_phase: runs the engine within a block of a training step and suspends it afterwards.

Used by training loops that share their device with the engine (colocated training), by
`trainer_hooks.train.main`, `trainer_hooks.train.warm_up` and `trainer_hooks.trl_rollouts`.
`trainer_hooks.metrics.time_account` reads PhaseTimings. A phase pauses, suspends, resumes and
unpauses the LLM, and pushes weights.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.config import KVCacheManagementMode, as_enum
from rollout.control.reports import ResumeReport, SuspendReport, WeightUpdateReport
from rollout.control.state import EngineState
from rollout.engine.suspension import check_resources
from rollout.errors import ConfigError
from trainer_hooks.weight_sync import NamedParameters

# A name for the times and reports, and a call of the LLM or of the weight sync.
_NamedCall = tuple[str, Callable[[], Any]]
_RESUMES = "resume_weights", "resume"


class Suspendable(Protocol):
    """The control methods of an LLM that a phase calls. AsyncLLM's methods return awaitables."""

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        ...

    def pause(self) -> Any:
        """Stop the engine's steps: RUNNING -> PAUSED."""
        ...

    def suspend(
        self,
        mode: KVCacheManagementMode | None = None,
        release: Sequence[str] = ...,
        discard_weights: bool = ...,
    ) -> Any:
        """Release memory: PAUSED -> SUSPENDED. Returns a SuspendReport."""
        ...

    def resume(self, only: str | None = None) -> Any:
        """Restore memory: SUSPENDED -> PAUSED. Returns a ResumeReport.

        `only`: name of the single resource to restore. The engine stays SUSPENDED while other
        resources are released.
        """
        ...

    def unpause(self) -> Any:
        """Continue the engine's steps: PAUSED -> RUNNING."""
        ...


class PushesWeights(Protocol):
    """The push methods of a WeightSync."""

    def push(
        self, named_parameters: NamedParameters, version: int | None = None
    ) -> WeightUpdateReport:
        """Push the weights and commit them as `version`, or as the next version if it is None."""
        ...

    async def apush(
        self, named_parameters: NamedParameters, version: int | None = None
    ) -> WeightUpdateReport:
        """Push the weights as `push` does, from a coroutine."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimings:
    """Seconds of each part of a phase. A part that was not needed has 0."""

    update_s: float  # push of the weights
    resume_s: float  # resumes and the unpause
    generate_s: float  # the block
    suspend_s: float  # the suspend and all pauses, including a pause before the push


class GenerationPhase:
    """A context manager that runs the engine in its block and suspends it afterwards.

    `timings()` and the reports are complete after the block.
    """

    def __init__(
        self,
        llm: Suspendable,
        weight_sync: PushesWeights | None,
        named_parameters: NamedParameters | None,
        version: int | None,
        mode: KVCacheManagementMode | None,
        release: Sequence[str],
        discard_weights: bool,
    ) -> None:
        if (weight_sync is None) != (named_parameters is None):
            raise ConfigError(
                "weight_sync and named_parameters belong together: pass both, or neither for a "
                "phase without new weights"
            )
        if version is not None and weight_sync is None:
            raise ConfigError(
                f"version={version} needs new weights; pass weight_sync and named_parameters too, "
                "or leave version out"
            )
        check_resources(release, discard=discard_weights)
        self._llm = llm
        self._push: tuple[PushesWeights, NamedParameters] | None = None
        if weight_sync is not None and named_parameters is not None:
            self._push = (weight_sync, named_parameters)
        self._version = version
        self._mode = None if mode is None else as_enum("mode", KVCacheManagementMode, mode)
        self._release, self._discard = tuple(release), discard_weights
        self._seconds: dict[str, float] = {}
        self._reports: dict[str, Any] = {}
        self._generate_start_s = 0.0

    def timings(self) -> PhaseTimings:
        """Return the seconds of each part. Call this after the block."""
        seconds = self._seconds
        return PhaseTimings(
            update_s=seconds.get("update", 0.0),
            resume_s=sum(seconds.get(name, 0.0) for name in (*_RESUMES, "unpause")),
            generate_s=seconds.get("generate", 0.0),
            suspend_s=seconds.get("pause", 0.0) + seconds.get("suspend", 0.0),
        )

    @property
    def update_report(self) -> WeightUpdateReport | None:
        """Report of the push, or None if nothing was pushed."""
        return self._reports.get("update")

    @property
    def resume_report(self) -> ResumeReport | None:
        """Report of the resume, or None if the engine was not suspended.

        If the weights were resumed before other resources, this is the sum of the two reports.
        """
        reports = [self._reports[name] for name in _RESUMES if name in self._reports]
        return _sum_of(reports) if reports else None

    @property
    def suspend_report(self) -> SuspendReport | None:
        """Report of the suspend, or None before the suspend or if the block stopped the engine."""
        return self._reports.get("suspend")

    def __enter__(self) -> GenerationPhase:
        if inspect.iscoroutinefunction(self._llm.pause):
            raise ConfigError(
                f"the methods of {type(self._llm).__name__} have to be awaited: use "
                "`async with generation_phase(...)`"
            )
        try:
            self._run(self._entry_calls(asynchronous=False))
        except BaseException:
            self._run(self._undo_calls())
            raise
        self._generate_start_s = time.perf_counter()
        return self

    def __exit__(self, *exception: object) -> None:
        self._seconds["generate"] = time.perf_counter() - self._generate_start_s
        self._run(self._exit_calls())

    async def __aenter__(self) -> GenerationPhase:
        try:
            await self._arun(self._entry_calls(asynchronous=True))
        except BaseException:
            await self._arun(self._undo_calls())
            raise
        self._generate_start_s = time.perf_counter()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._seconds["generate"] = time.perf_counter() - self._generate_start_s
        await self._arun(self._exit_calls())

    def _entry_calls(self, *, asynchronous: bool) -> Iterator[_NamedCall]:
        if self._push is not None:
            weight_sync, named_parameters = self._push
            if self._llm.state is EngineState.RUNNING:
                yield "pause", self._llm.pause
            # The push needs the weights' memory. Other memory is restored after it.
            if self._llm.state is EngineState.SUSPENDED:
                yield "resume_weights", lambda: self._llm.resume(only="weights")
            push = weight_sync.apush if asynchronous else weight_sync.push
            yield "update", lambda: push(named_parameters, self._version)
        if self._llm.state is EngineState.SUSPENDED:
            yield "resume", self._llm.resume
        if self._llm.state is not EngineState.RUNNING:
            yield "unpause", self._llm.unpause

    def _exit_calls(self) -> Iterator[_NamedCall]:
        if self._llm.state is EngineState.RUNNING:
            yield "pause", self._llm.pause
        if self._llm.state is EngineState.PAUSED:
            yield "suspend", self._suspend

    def _undo_calls(self) -> Iterator[_NamedCall]:
        if self._llm.state is EngineState.SUSPENDED and "resume_weights" in self._reports:
            yield "suspend", self._suspend
        yield from self._exit_calls()

    def _suspend(self) -> Any:
        return self._llm.suspend(self._mode, self._release, self._discard)

    def _run(self, calls: Iterator[_NamedCall]) -> None:
        for name, call in calls:
            start_s = time.perf_counter()
            self._record(name, start_s, call())

    async def _arun(self, calls: Iterator[_NamedCall]) -> None:
        for name, call in calls:
            start_s = time.perf_counter()
            report = call()
            self._record(name, start_s, await report if inspect.isawaitable(report) else report)

    def _record(self, name: str, start_s: float, report: Any) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start_s
        self._reports[name] = report


def _sum_of(reports: Sequence[ResumeReport]) -> ResumeReport:
    owners = sorted({owner for report in reports for owner in report.restored_by_owner})
    return ResumeReport(
        mode=reports[-1].mode,
        seconds=sum(report.seconds for report in reports),
        bytes_restored=sum(report.bytes_restored for report in reports),
        restored_by_owner={
            owner: sum(report.restored_by_owner.get(owner, 0) for report in reports)
            for owner in owners
        },
        graphs_recaptured=sum(report.graphs_recaptured for report in reports),
        num_requests_recomputed=sum(report.num_requests_recomputed for report in reports),
    )


def generation_phase(
    llm: Suspendable,
    weight_sync: PushesWeights | None = None,
    named_parameters: NamedParameters | None = None,
    version: int | None = None,
    mode: KVCacheManagementMode | None = None,
    release: Sequence[str] = ("kv_cache",),
    discard_weights: bool = False,
) -> GenerationPhase:
    """Return a context manager that runs the engine in a `with` or `async with` block.

    The engine may be running, paused or suspended before. Entry pushes the weights, if given, while
    the engine is paused or suspended. Entry then resumes and unpauses the engine. Exit pauses and
    suspends it, also after an exception in the block or a refused push. Unfinished requests stay in
    the engine and continue in the next phase with the new weights.
    `weight_sync`, `named_parameters`: pusher of the weights, and the weights to push. Without new
    weights both are None.
    `version`: version of the pushed weights. None means the engine's next version.
    `mode`: KVCacheManagementMode of the suspend. None means the mode of the engine's config.
    `release`: resources that the suspend releases, "kv_cache" and "weights". Entry restores
    released weights before the push and the KV cache after it.
    `discard_weights`: keep no copy of released weights. The next phase must then push all weights.
    The push writes them in place, without memory for a second copy.

        with generation_phase(llm, WeightSync(llm), policy):
            groups = llm.collect(num_groups=64)

    Raises ConfigError if only one of `weight_sync` and `named_parameters` is given, or `version`
    without them. Raises ConfigError for an unknown mode or resource, and for `discard_weights`
    without "weights" in `release`. Entry by a plain `with` raises ConfigError for an asynchronous
    LLM.
    """
    return GenerationPhase(
        llm, weight_sync, named_parameters, version, mode, release, discard_weights
    )
