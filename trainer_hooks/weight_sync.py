"""WeightSync: carries a trainer's weights into the engines of an LLM."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn

from rollout.errors import ConfigError, WeightUpdateError
from rollout.models.lora import LoraAdapter
from rollout.models.plain_tensors import full_tensor, is_sharded, named_weights, refusal
from rollout.runner.weight_update import NamedTensors, WeightUpdateReport, by_name

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

    def __init__(self, llm: UpdatesWeights, in_flight: bool = False) -> None:
        self._llm = llm
        self._how = {"in_flight": True} if in_flight else {}

    def push(
        self, named_parameters: NamedParameters, version: int | None = None
    ) -> WeightUpdateReport:
        """Commit the weights under `version` (None: the next one above the current).

        `named_parameters`: a module (a transformers model, say), whose persistent buffers are part
        of the update, its `named_parameters()`, or a mapping of names to tensors. Of a PEFT model
        it is the active adapter, which the engines put on their own base: a LoraAdapter is taken,
        too. Tensors are read only, and not kept. Sharded ones (FSDP2) are gathered, so all ranks
        push at the same time; a rank without an engine takes part through `full_tensors`.
        Raises WeightUpdateError, with weights and version untouched, if a tensor is missing, extra,
        misshapen or not finite, or if `version` is not above the current one. An update that
        failed because an engine was lost is tried once more with the remaining engines, unless
        other ranks would have to gather again. Raises ConfigError for an asynchronous LLM, before
        anything is sent.
        """
        tensors = _detached(named_parameters)
        how: dict[str, Any] = {"version": version, **self._how}
        report: WeightUpdateReport
        try:
            report = self._updated(tensors, how)
        except WeightUpdateError as error:
            _require_repeatable(error, tensors)
            report = self._updated(tensors, how)
        return report

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
        tensors = _detached(named_parameters)
        how: dict[str, Any] = {"version": version, **self._how}
        report: WeightUpdateReport
        try:
            report = await _result(self._llm.update_weights(tensors, **how))
        except WeightUpdateError as error:
            _require_repeatable(error, tensors)
            report = await _result(self._llm.update_weights(tensors, **how))
        return report


# The names by which WeightSync is known for each kind of LLM.
InProcessWeightSync = WeightSync
SharedMemoryWeightSync = WeightSync


def full_tensors(named_parameters: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Each weight as a whole tensor, in the order of names; shards are gathered one after another.

    A push gathers in the same order, so a rank without an engine takes part in the push of another
    with `for _ in full_tensors(policy): pass`, which holds one whole tensor at a time. The sources
    of all ranks have the same names. Raises WeightUpdateError naming what cannot be read.
    """
    tensors = by_name(_detached(named_parameters))
    for name in sorted(tensors):
        if reason := refusal(tensors[name]):
            raise WeightUpdateError(f"{name!r} {reason}")
        yield name, full_tensor(tensors[name])


async def _result(report: Any) -> Any:
    return await report if inspect.isawaitable(report) else report


def _require_repeatable(error: WeightUpdateError, tensors: NamedTensors) -> None:
    """Raise the error of an update unless this process alone can try it once more."""
    if not error.is_transient:
        raise error
    if any(map(is_sharded, by_name(tensors).values())):
        again = WeightUpdateError(f"{error}; its tensors are sharded: push again on all ranks")
        again.is_transient = True
        raise again from error


def _detached(named_parameters: NamedParameters) -> list[tuple[str, Tensor]] | LoraAdapter:
    """Names and tensors without their graph; tied tensors come once from a module."""
    if isinstance(named_parameters, nn.Module) and getattr(named_parameters, "peft_config", None):
        return LoraAdapter.from_peft(named_parameters)
    if isinstance(named_parameters, LoraAdapter):
        tensors = {name: tensor.detach() for name, tensor in named_parameters.tensors.items()}
        return replace(named_parameters, tensors=tensors)
    if isinstance(named_parameters, nn.Module):
        named_parameters = named_weights(named_parameters)
    if isinstance(named_parameters, Mapping):
        named_parameters = named_parameters.items()
    return [(name, tensor.detach()) for name, tensor in named_parameters]
