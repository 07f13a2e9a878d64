"""SpmdExecutor: the executor of rank 0 where the other ranks are processes of a trainer, which
call the same verbs as rank 0 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rollout.errors import EngineStateError, LockstepError
from rollout.parallel.channel import LeadChannel, raise_first
from rollout.parallel.collectives import Collectives
from rollout.tensor_parallel.executor import TensorParallelExecutor
from rollout.weights.served import ServedWeights
from rollout.weights.update import NamedTensors
from rollout.worker.kv_cache import KVCache
from rollout.worker.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbCall:
    """A verb that a rank has called. `digests`: of its arguments by name, of those that have to be
    the same on all ranks."""

    verb: str
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbOutcome:
    """What rank 0 tells the others at the end of a verb: its pickled result, or its encoded error,
    and what the engine's state and version are from now on."""

    result: bytes = b""
    error: Mapping[str, Any] | None = None
    state: str
    weights_version: int


class SpmdExecutor(TensorParallelExecutor):
    """As TensorParallelExecutor, within a verb that all ranks have called: `begin_verb` meets them,
    and `end_verb` lets them go. One thread at a time calls verbs, so one channel has all orders.

    The end of the group ends no process: whoever waits raises LockstepError, at once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVCache,
        weights: ServedWeights,
        *,
        collectives: Collectives,
        channel: LeadChannel,
        start_timeout_s: float,
    ) -> None:
        """`start_timeout_s`: for the other ranks to call a verb after this one."""
        super().__init__(
            *(runner, kv, weights),
            collectives=collectives,
            channel=channel,
            staging=channel,
            followers=(),
        )
        self._start_timeout_s = start_timeout_s

    def begin_verb(self, call: VerbCall) -> None:
        """Wait until all ranks have called a verb. Raises EngineStateError, here and there, if it
        is not the same one; they can call another one then.
        """
        order = self._send("verb", call)
        try:
            calls = self._channel.answers(order, self._start_timeout_s, f"call {call.verb}")
        except LockstepError as error:
            raise self._lose(str(error)) from error
        if refusal := _difference([call, *calls]):
            self._send("refuse", refusal)
            raise EngineStateError(refusal)

    def end_verb(self, outcome: VerbOutcome) -> None:
        """Let the others return from the verb. Does nothing once the group has ended."""
        with suppress(LockstepError):
            while self._to_drop:
                self._channel.send("drop", self._to_drop.popleft())
            self._send("over", outcome)

    @contextmanager
    def _shared(
        self, named_tensors: NamedTensors
    ) -> Iterator[tuple[NamedTensors, tuple[Any, ...]]]:
        """The others read their own sources along, for ranks of a trainer gather together."""
        order = self._staging_order("read_along")
        with super()._shared(named_tensors) as shared:
            raise_first(self._staging_answers(order))
            yield shared

    def _send_drops(self) -> None:
        """They wait for the end of the verb: others take orders within one."""

    def _lose(self, reason: str) -> LockstepError:
        error = super()._lose(reason)
        self._collectives.abort()
        self._channel.end(error)
        return error

    def close(self) -> None:
        self._channel.end(LockstepError("rank 0 has shut the engine down"))
        super().close()


def _difference(calls: list[VerbCall]) -> str | None:
    """What the ranks have called differently, in words; None if nothing."""
    first, remedy = calls[0], "all ranks of pg_collection.tp call the same verbs, in one order"
    if any(call.verb != first.verb for call in calls):
        named = ", ".join(f"rank {rank} called {call.verb}" for rank, call in enumerate(calls))
        return f"the ranks have called different verbs: {named}; {remedy}"
    for rank, call in enumerate(calls):
        for name, digest in first.digests.items():
            if call.digests[name] != digest:
                return (
                    f"ranks 0 and {rank} have called {first.verb} with different {name}; all ranks "
                    "of pg_collection.tp give the same arguments"
                )
    return None
