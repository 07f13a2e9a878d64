"""WeightSync: carries a trainer's weights into the engines of an LLM."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from rollout.control.reports import WeightUpdateReport
from rollout.errors import ConfigError, WeightUpdateError
from rollout.weights.stream import WeightStream
from rollout.weights.update import NamedTensors
from trainer_hooks.weight_sync.sources import weights_of

NamedParameters = NamedTensors


class UpdatesWeights(Protocol):
    """The one verb of LLM that weights travel through; an asynchronous LLM returns an awaitable."""

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> Any:
        """Verify all tensors, then commit them under `version`; returns a WeightUpdateReport."""
        ...


class WeightSync:
    """Pushes a trainer's weights to all engines of `llm`: all of them commit, or none does.

        sync = WeightSync(llm)
        sync.push(policy)  # await sync.apush(policy) for AsyncLLM and ThreadedLLM

    An engine in this process copies the trainer's live tensors in place. For engine processes
    (AsyncLLM, LLM(use_coordinator=True)) they are copied once into shared memory, from where all
    engines take them; the last committed copy stays, for an engine that comes late.
    `in_flight`: commit between two steps while requests run; otherwise the engines are paused or
    suspended.
    """

    # Before each further attempt of a push that lost an engine. A link that fails may take all
    # engines, which dial again for 30 s.
    retry_pauses_s: ClassVar[Sequence[float]] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)

    def __init__(self, llm: UpdatesWeights, in_flight: bool = False) -> None:
        self._llm = llm
        self._how = {"in_flight": True} if in_flight else {}

    def push(
        self, named_parameters: NamedParameters, version: int | None = None
    ) -> WeightUpdateReport:
        """Commit the weights under `version` (None: the next one above the current).

        `named_parameters`: what `full_tensors` reads: a module (a transformers model, say), wrapped
        or not, whose persistent buffers are part of the update; its `named_parameters()`; a mapping
        of names to tensors; any iterator of both. Of a PEFT model it is the active adapter, which
        the engines put on their own base: a LoraAdapter is taken, too. Tensors are read only, and
        not kept. Where ranks hold parts (FSDP, ZeRO-3), they are gathered one after the other, so
        all ranks push at the same time; a rank without an engine calls `join_push`.
        Raises WeightUpdateError, with weights and version untouched, if a tensor is missing, extra,
        misshapen or not finite, or if `version` is not above the current one; the other ranks are
        not kept waiting then. An update that failed because an engine was lost is tried again with
        the engines that are there then, after `retry_pauses_s`, unless it can be read only once.
        Raises ConfigError for an asynchronous LLM, before anything is sent.
        """
        tensors = weights_of(named_parameters)
        how: dict[str, Any] = {"version": version, **self._how}
        pauses = iter(self.retry_pauses_s)
        while True:
            try:
                report: WeightUpdateReport = self._updated(tensors, how)
                return report
            except WeightUpdateError as error:
                _drain(tensors)
                time.sleep(_pause_s(error, tensors, pauses))
            except Exception:
                _drain(tensors)
                raise

    def _updated(self, tensors: NamedTensors, how: Mapping[str, Any]) -> Any:
        report = self._llm.update_weights(tensors, **how)
        if not inspect.isawaitable(report):
            return report
        if inspect.iscoroutine(report):
            report.close()  # avoids the warning for a coroutine that was never awaited
        raise ConfigError(
            f"{type(self._llm).__name__}.update_weights has to be awaited: use `await apush(...)`"
        )

    async def apush(
        self, named_parameters: NamedParameters, version: int | None = None
    ) -> WeightUpdateReport:
        """As `push`, for a coroutine; a synchronous LLM holds the event loop while it copies."""
        tensors = await asyncio.to_thread(weights_of, named_parameters)
        how: dict[str, Any] = {"version": version, **self._how}
        pauses = iter(self.retry_pauses_s)
        while True:
            try:
                updated = self._llm.update_weights(tensors, **how)
                report: WeightUpdateReport = await _result(updated)
                return report
            except WeightUpdateError as error:
                await asyncio.to_thread(_drain, tensors)
                await asyncio.sleep(_pause_s(error, tensors, pauses))
            except Exception:  # not if this is cancelled: the update goes on, and reads them itself
                await asyncio.to_thread(_drain, tensors)
                raise


# The names by which WeightSync is known for each kind of LLM.
InProcessWeightSync = WeightSync
SharedMemoryWeightSync = WeightSync


async def _result(report: Any) -> Any:
    return await report if inspect.isawaitable(report) else report


def _drain(tensors: NamedTensors) -> None:
    """Let the other ranks of a trainer gather to the end what is not read here any more."""
    if isinstance(tensors, WeightStream):
        tensors.drain()


def _pause_s(error: WeightUpdateError, tensors: NamedTensors, pauses: Iterator[float]) -> float:
    """How long to wait for the next attempt. Raises the error unless this process alone can make
    one."""
    pause_s = next(pauses, None)
    if not error.is_transient or pause_s is None:
        raise error
    if isinstance(tensors, WeightStream):
        again = WeightUpdateError(
            f"{error}; its tensors, sharded or of an iterator, were read: push again on all ranks"
        )
        again.is_transient = True
        raise again from error
    return pause_s
