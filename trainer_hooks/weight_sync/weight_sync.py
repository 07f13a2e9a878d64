"""WeightSync: pushes a trainer's weights into the engines of an LLM.

Used by users' training loops, `trainer_hooks.train`, `trainer_hooks.phase` and
`trainer_hooks.trl_rollouts`, after each update. A push changes the weights of the LLM's engines.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rollout.control.reports import WeightUpdateReport
from rollout.errors import ConfigError, WeightUpdateError
from rollout.weights.update import NamedTensors, WeightStream
from trainer_hooks.weight_sync.sources import weights_of

NamedParameters = NamedTensors


class UpdatesWeights(Protocol):
    """The method of an LLM that a push calls. An asynchronous LLM returns an awaitable."""

    def update_weights(
        self, named_tensors: NamedTensors, version: int | None = None, in_flight: bool = False
    ) -> Any:
        """Verify all tensors, then commit them as `version`. Returns a WeightUpdateReport."""
        ...


class WeightSync:
    """Pushes a trainer's weights to all engines of `llm`. Either all engines commit, or none does.

        sync = WeightSync(llm)
        sync.push(policy)  # await sync.apush(policy) for AsyncLLM and ThreadedLLM

    An engine in this process copies the trainer's tensors in place. Engine processes (of AsyncLLM
    or LLM(use_coordinator=True)) get the tensors by the LLM's `weight_transport`, which is shared
    memory by default. Subclasses choose another transport.
    `in_flight`: True commits between two steps while requests run. Otherwise the engines must be
    paused or suspended.
    """

    # Seconds before each further attempt of a push that failed because an engine disconnected. A
    # network failure may disconnect all engines, which try to reconnect for 30 s.
    retry_pauses_s: ClassVar[Sequence[float]] = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)

    def __init__(self, llm: UpdatesWeights, in_flight: bool = False) -> None:
        self._llm = llm
        self._options = {"in_flight": True} if in_flight else {}

    def push(
        self, named_parameters: NamedParameters, version: int | None = None
    ) -> WeightUpdateReport:
        """Commit the weights under `version`. None means the next version.

        `named_parameters`: any source of `full_tensors`, such as a module (wrapped or not) or its
        `named_parameters()`. A module also gives its persistent buffers. A PEFT model or a
        LoraAdapter gives its adapter, which the engines merge into their own base. Tensors are only
        read, and not kept.
        If each rank holds a part (FSDP, ZeRO-3), the parts are gathered one after the other, so all
        ranks push at the same time. A rank without an engine calls `join_push`.

        Raises WeightUpdateError, with weights and version unchanged, if a tensor is missing, extra,
        misshapen or not finite, or if `version` is not above the current one. After an error the
        source is read to its end, so that no other rank waits in a collective. A push that failed
        because an engine disconnected is repeated with the remaining engines, after
        `retry_pauses_s`, unless its tensors can be read only once. Raises ConfigError for an
        asynchronous LLM, before anything is sent.
        """
        tensors = weights_of(named_parameters)
        pauses = iter(self.retry_pauses_s)
        while True:
            try:
                return self._updated(tensors, version)
            except WeightUpdateError as error:
                _drain(tensors)
                time.sleep(_pause_s(error, tensors, pauses))
            except Exception:
                _drain(tensors)
                raise

    def _updated(self, tensors: NamedTensors, version: int | None) -> WeightUpdateReport:
        report = self._llm.update_weights(tensors, version=version, **self._options)
        if not inspect.isawaitable(report):
            done: WeightUpdateReport = report
            return done
        if inspect.iscoroutine(report):
            report.close()  # avoids the warning for a coroutine that was never awaited
        raise ConfigError(
            f"{type(self._llm).__name__}.update_weights has to be awaited: use `await apush(...)`"
        )

    async def apush(
        self, named_parameters: NamedParameters, version: int | None = None
    ) -> WeightUpdateReport:
        """Push from a coroutine, as `push` does. A synchronous LLM blocks the event loop."""
        tensors = await asyncio.to_thread(weights_of, named_parameters)
        pauses = iter(self.retry_pauses_s)
        while True:
            try:
                updated = self._llm.update_weights(tensors, version=version, **self._options)
                report: WeightUpdateReport = (
                    await updated if inspect.isawaitable(updated) else updated
                )
                return report
            except WeightUpdateError as error:
                await asyncio.to_thread(_drain, tensors)
                await asyncio.sleep(_pause_s(error, tensors, pauses))
            except Exception:  # a cancelled update continues and still reads the tensors
                await asyncio.to_thread(_drain, tensors)
                raise


InProcessWeightSync = WeightSync  # the same class, named for an engine in this process


class _TransportWeightSync(WeightSync):
    """Pushes to engine processes by one transport, which replaces the LLM's own."""

    def __init__(self, llm: UpdatesWeights, transport: str, in_flight: bool) -> None:
        super().__init__(llm, in_flight)
        use_transport = getattr(llm, "use_weight_transport", None)
        if use_transport is None:
            raise ConfigError(
                f"{type(self).__name__} pushes to engines in other processes, which "
                f"{type(llm).__name__} does not have: use InProcessWeightSync, or AsyncLLM or "
                "LLM(use_coordinator=True)"
            )
        use_transport(transport)


class SharedMemoryWeightSync(_TransportWeightSync):
    """Pushes weights through shared memory to engine processes of this machine.

    The tensors are copied once, and all engines read that copy. The last committed copy is kept for
    engines that connect later. Raises ConfigError if the engine is in this process.
    """

    def __init__(self, llm: UpdatesWeights, in_flight: bool = False) -> None:
        super().__init__(llm, "shared", in_flight)


class CollectiveWeightSync(_TransportWeightSync):
    """Pushes weights by broadcasts to engines on any host, in a group of torch.distributed.

    `host`: address of this machine that the engines can reach. None means the address by which they
    reach the coordinator.
    Nothing is kept, so an engine that connects later waits for the next push. The network must be
    private. Raises ConfigError if the engine is in this process, or if this machine cannot listen
    at `host`.
    """

    def __init__(
        self, llm: UpdatesWeights, in_flight: bool = False, *, host: str | None = None
    ) -> None:
        super().__init__(llm, "collective" if host is None else f"collective:{host}", in_flight)


class CheckpointWeightSync(_TransportWeightSync):
    """Pushes weights as checkpoints in `directory`, which the engines see under the same path.

    The last committed checkpoint is kept for engines that connect later, until the LLM ends. Raises
    ConfigError if the engine is in this process, or if `directory` cannot be created.
    """

    def __init__(self, llm: UpdatesWeights, directory: str | Path, in_flight: bool = False) -> None:
        super().__init__(llm, f"directory:{directory}", in_flight)


def _drain(tensors: NamedTensors) -> None:
    if isinstance(tensors, WeightStream):  # the trainer's other ranks gather its rest, too
        tensors.drain()


def _pause_s(error: WeightUpdateError, tensors: NamedTensors, pauses: Iterator[float]) -> float:
    pause_s = next(pauses, None)
    if not error.is_transient or pause_s is None:
        raise error
    if isinstance(tensors, WeightStream):
        again = WeightUpdateError(
            f"{error}; its tensors, sharded or from an iterator, can be read only once: push again "
            "on all ranks"
        )
        again.is_transient = True
        raise again from error
    return pause_s
