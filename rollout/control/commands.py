"""The commands of an engine: pause, suspend, resume, set the version, report counters, stop.

A command is one struct: its fields are the arguments and travel in messages, `transition` says in
which states it is legal, and `run` calls the method of the engine that does the work. Nothing here
holds state.

Used by `rollout.engine.engine`, `rollout.apis`, `rollout.testing`, `rollout.serve.llm`,
`rollout.cli.top` and `rollout.coordinator`, whose core and agents receive commands as messages.
Engines, runtimes, LLMs and clients take commands by one generic method, `do(command)`. LLMs and
clients inherit methods such as `suspend(...)` from `ControlCalls`, `AsyncControlCalls` or
`ClientControlCalls`.

To add an argument to a command, add a field to its struct, pass it on in `run`, and add it to the
methods below. A new command is a new struct in COMMANDS, with a tag that no other message has, and
a Transition in rollout/control/state.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta, field

from rollout.config import KVCacheManagementMode
from rollout.control import state
from rollout.control.reports import (
    EngineStats,
    FleetStats,
    ResumeReport,
    SuspendReport,
    WeightChecksums,
    stats_by_engine,
    stats_of_fleet,
    sum_of_reports,
)
from rollout.control.state import EngineState, Transition
from rollout.errors import ConfigError, EngineStateError, ProtocolError
from rollout.wire import FAULTS, Count, Message, Name, Seconds, Version

R = TypeVar("R")
COMMAND_DEADLINE_S, UPDATE_DEADLINE_S = 60.0, 600.0
ResourceNames = Annotated[Sequence[Name], Meta(max_length=64)]
_POSITION = re.compile(r" - at `\$\[(\d+)\].*")


class ControlledEngine(Protocol):
    """The methods that commands call. `rollout.engine.engine.Engine` implements them."""

    @property
    def weights_version(self) -> int: ...

    def pause(self) -> None: ...

    def unpause(self) -> None: ...

    def suspend(
        self, mode: str | None, release: Sequence[str], discard_weights: bool
    ) -> SuspendReport: ...

    def resume(self, only: str | None) -> ResumeReport: ...

    def set_generation_epoch(self, version: int) -> None: ...

    def stats(self) -> EngineStats: ...

    def weight_checksums(self, start: int) -> WeightChecksums: ...

    def shutdown(self) -> None: ...


class FleetResults(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """The results of one command on the engines of a fleet.

    state: the name of the fleet's state after the command. weights_checksum: checksum of the
    weights that all engines serve, "" if it is not known. by_rank: each engine's result by its
    rank; empty if no engine was asked. lost_ranks: ranks of engines that disconnected meanwhile.
    num_queued: requests that wait for an engine. refused: how many connections and peers the
    coordinator refused, by reason; only for Stats.
    """

    state: str
    weights_version: int
    weights_checksum: str = ""
    by_rank: Mapping[int, R] = field(default_factory=dict, name="ranks")
    lost_ranks: Sequence[int] = ()
    num_queued: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


class ControlMessage(Message, Generic[R], frozen=True, kw_only=True):
    """A command as a message from a client to the coordinator.

    command_id: the sender's number of the command. A message with the number of an earlier command
    runs nothing again, and gets the same answer. deadline_s: seconds until the answer is due; None
    takes the coordinator's `command_deadline_s`. An engine in this process ignores both.
    """

    transition: ClassVar[Transition]
    command_id: Count = 0
    deadline_s: Seconds | None = None

    @property
    def name(self) -> str:
        """The command's name in error messages."""
        return self.transition.name

    def merged(self, results: FleetResults[R]) -> R:
        """Return the results of all engines merged into one."""
        raise NotImplementedError

    def read(self, answer: Mapping[str, Any]) -> FleetResults[R]:
        """Return a coordinator's answer as results of this command's type. Raises ProtocolError if
        it is malformed."""
        try:
            results: FleetResults[R] = msgspec.convert(
                answer, _results_type(type(self)), str_keys=True
            )
        except FAULTS as fault:
            raise ProtocolError(f"the answer to {self.name} is malformed: {fault}") from fault
        return results

    def check(self) -> None:
        """Raise ConfigError, which names the argument, if a receiver would refuse the message."""
        try:
            msgspec.convert(msgspec.to_builtins(self), type(self))
        except FAULTS as fault:
            reason, where = str(fault), ""
            if (found := _POSITION.search(reason)) is not None:
                argument = self.__struct_fields__[int(found[1]) - 1]
                where = f"{argument}={getattr(self, argument)!r:.100} "
                reason = reason[: found.start()].replace("Expected", "must be")
            raise ConfigError(f"{self.name}: {where}{reason.replace(', got', ', not')}") from fault


@cache
def _results_type(command_type: type[ControlMessage[Any]]) -> Any:
    """Return the type FleetResults[R] for a subclass of ControlMessage[R]."""
    base: Any = command_type.__orig_bases__[0]  # type: ignore[attr-defined]
    fleet_results: Any = FleetResults
    return fleet_results[get_args(base)]


class Command(ControlMessage[R], Generic[R], frozen=True, kw_only=True):
    """A command that an engine runs between two steps. The coordinator sends it on to its engines.

    uses_weights: whether the command waits while an engine in this process stages an update. It
    does if it moves or reads the weights, changes their version, or stops the engine. ends_staging:
    whether an engine of a fleet cancels the update that it stages, because the command moves the
    weights' memory or stops the engine.
    """

    uses_weights: ClassVar[bool] = False
    ends_staging: ClassVar[bool] = False

    def run(self, engine: ControlledEngine) -> R:
        """Call the method of `engine` that does the work. Raises what that method raises."""
        raise NotImplementedError


class CommandWithoutResult(Command[None], frozen=True, kw_only=True):
    """A command that returns None."""

    def merged(self, results: FleetResults[None]) -> None:
        return None


class Pause(CommandWithoutResult, frozen=True, kw_only=True, tag=40):
    """Pause at the next step edge, that is, between two steps."""

    transition = state.PAUSE

    def run(self, engine: ControlledEngine) -> None:
        engine.pause()


class Unpause(CommandWithoutResult, frozen=True, kw_only=True, tag=41):
    """Let a paused engine generate again."""

    transition = state.UNPAUSE

    def run(self, engine: ControlledEngine) -> None:
        engine.unpause()


class Suspend(Command[SuspendReport], frozen=True, kw_only=True, tag=42):
    """Release memory; unfinished requests stay.

    mode: a KVCacheManagementMode; None takes the one of the engine's config. release: the resources
    to release, "kv_cache", "weights" or both. discard_weights: keep no copy of the weights.
    """

    transition = state.SUSPEND
    uses_weights = ends_staging = True
    mode: Name | None = None
    release: ResourceNames = ("kv_cache",)
    discard_weights: bool = False

    def run(self, engine: ControlledEngine) -> SuspendReport:
        return engine.suspend(self.mode, self.release, self.discard_weights)

    def merged(self, results: FleetResults[SuspendReport]) -> SuspendReport:
        return sum_of_reports(SuspendReport(mode=""), results.by_rank.values())


class Resume(Command[ResumeReport], frozen=True, kw_only=True, tag=43):
    """Restore released resources. only: the one resource to restore; None restores all."""

    transition = state.RESUME
    uses_weights = ends_staging = True
    only: Name | None = None

    def run(self, engine: ControlledEngine) -> ResumeReport:
        return engine.resume(self.only)

    def merged(self, results: FleetResults[ResumeReport]) -> ResumeReport:
        return sum_of_reports(ResumeReport(mode=""), results.by_rank.values())


class SetGenerationEpoch(CommandWithoutResult, frozen=True, kw_only=True, tag=44):
    """Change the version of the served weights to `version`."""

    transition = state.SET_GENERATION_EPOCH
    uses_weights = True
    version: Version

    def run(self, engine: ControlledEngine) -> None:
        engine.set_generation_epoch(self.version)


class Stop(CommandWithoutResult, frozen=True, kw_only=True, tag=45):
    """Stop for good; requests can still be aborted."""

    transition = state.STOP
    uses_weights = ends_staging = True

    def run(self, engine: ControlledEngine) -> None:
        engine.shutdown()


class IncrementStaleness(CommandWithoutResult, frozen=True, kw_only=True, tag=46):
    """Increase the version of the served weights by 1."""

    transition = state.INCREMENT_STALENESS
    uses_weights = True

    def run(self, engine: ControlledEngine) -> None:
        engine.set_generation_epoch(engine.weights_version + 1)


class Shutdown(CommandWithoutResult, frozen=True, kw_only=True, tag=61):
    """Stop for good, from any state; engine processes end."""

    transition = state.SHUTDOWN
    uses_weights = ends_staging = True

    def run(self, engine: ControlledEngine) -> None:
        engine.shutdown()


class Stats(Command[EngineStats], frozen=True, kw_only=True, tag=81):
    """Read counters and state. Changes nothing."""

    transition = state.STATS

    def run(self, engine: ControlledEngine) -> EngineStats:
        return engine.stats()

    def merged(self, results: FleetResults[EngineStats]) -> EngineStats:
        fleet_state = engine_state_of(results.state)
        return stats_of_fleet(results.by_rank, fleet_state, results.weights_version)


class ChecksumWeights(Command[WeightChecksums], frozen=True, kw_only=True, tag=85):
    """Read the checksums of a page of weights, which begins at the weight number `start`."""

    transition = state.WEIGHT_CHECKSUMS
    uses_weights = True
    start: Count = 0

    def run(self, engine: ControlledEngine) -> WeightChecksums:
        return engine.weight_checksums(self.start)

    def merged(self, results: FleetResults[WeightChecksums]) -> WeightChecksums:
        """Return the engines' common checksums. Raises EngineStateError if they differ or there is
        no engine."""
        if not results.by_rank:
            raise EngineStateError("no engine is connected to compute checksums")
        (first, page), *others = results.by_rank.items()
        for rank, other in others:
            if other != page:
                raise EngineStateError(f"engines {first} and {rank} serve different weights")
        return page


AnyCommand = (
    Pause
    | Unpause
    | Suspend
    | Resume
    | SetGenerationEpoch
    | Stop
    | IncrementStaleness
    | Shutdown
    | Stats
    | ChecksumWeights
)
COMMANDS: tuple[type[Command[Any]], ...] = get_args(AnyCommand)


def engine_state_of(fleet_state: str) -> EngineState:
    """Return the state of each engine in a fleet whose state has the name `fleet_state`."""
    return EngineState.STOPPED if fleet_state == "STOPPING" else EngineState[fleet_state]


def fleet_stats(results: FleetResults[EngineStats]) -> FleetStats:
    """Return the results of Stats as FleetStats."""
    return FleetStats(
        state=results.state,
        together=Stats().merged(results),
        engines=stats_by_engine(results.by_rank),
        num_queued=results.num_queued,
        refused=results.refused,
    )


# ---- methods for the users of an engine or fleet, one for each command


class ControlCalls(Protocol):
    """Commands as methods that return when the command has run. `LLM` inherits them."""

    def do(self, command: Command[R]) -> R:
        """Run a command, on all engines if there are several. Raises EngineStateError if the
        command is illegal now, and what the engine's method raises."""
        ...

    def pause(self) -> None:
        """Pause at the next step edge."""
        self.do(Pause())

    def unpause(self) -> None:
        """Let the engine generate again."""
        self.do(Unpause())

    def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """Release memory; unfinished requests stay. The engine must be paused.

        See Engine.suspend.
        """
        return self.do(Suspend(mode=mode, release=release, discard_weights=discard_weights))

    def resume(self, only: str | None = None) -> ResumeReport:
        """Restore all released memory, or the resource `only`. Once all is restored the engine is
        paused."""
        return self.do(Resume(only=only))

    def set_generation_epoch(self, version: int) -> None:
        """Set the weights version without new weights. The engine must be paused or suspended."""
        self.do(SetGenerationEpoch(version=version))

    def stats(self) -> EngineStats:
        """Return counters and state of the engine, or of all engines together."""
        return self.do(Stats())


class AsyncControlCalls(Protocol):
    """Commands as coroutine methods. `AsyncLLM`, `ThreadedLLM` and `FakeAsyncLLM` inherit them."""

    async def do(self, command: Command[R]) -> R:
        """Run a command, on all engines if there are several. Raises EngineStateError if the
        command is illegal now, and what the engine's method raises."""
        ...

    async def pause(self) -> None:
        """Pause all engines at their next step edge."""
        await self.do(Pause())

    async def unpause(self) -> None:
        """Let the engines generate again."""
        await self.do(Unpause())

    async def suspend(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
    ) -> SuspendReport:
        """Release memory; unfinished requests stay. The engines must be paused."""
        return await self.do(Suspend(mode=mode, release=release, discard_weights=discard_weights))

    async def resume(self, only: str | None = None) -> ResumeReport:
        """Restore all released memory, or the resource `only`. Once all is restored the engines
        are paused."""
        return await self.do(Resume(only=only))

    async def set_generation_epoch(self, version: int) -> None:
        """Set the weights version without new weights. The engines must be paused or suspended."""
        await self.do(SetGenerationEpoch(version=version))

    async def stats(self) -> EngineStats:
        """Return counters of all engines together."""
        return await self.do(Stats())


class ClientControlCalls(Protocol):
    """Commands to a fleet as methods that return futures. `InferenceClient` inherits them.

    The caller need not await a future. deadline_s: seconds that the answer may take.
    """

    def do(
        self, command: Command[R], *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[R]:
        """Run a command on all engines. Returns a future with the merged result, or with the error
        if the command was refused. Raises ConfigError for an argument of a wrong type."""
        ...

    def ask(
        self, command: Command[R], *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[FleetResults[R]]:
        """Run a command as `do` does. Returns a future with each engine's own result."""
        ...

    def pause_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> asyncio.Future[None]:
        """Pause all engines at their next step edge."""
        return self.do(Pause(), deadline_s=deadline_s)

    def unpause_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> asyncio.Future[None]:
        """Let paused engines generate again."""
        return self.do(Unpause(), deadline_s=deadline_s)

    def suspend_engines(
        self,
        mode: KVCacheManagementMode | str | None = None,
        release: Sequence[str] = ("kv_cache",),
        discard_weights: bool = False,
        *,
        deadline_s: float = COMMAND_DEADLINE_S,
    ) -> asyncio.Future[SuspendReport]:
        """Release memory of paused engines. Arguments as for Engine.suspend."""
        command = Suspend(mode=mode, release=release, discard_weights=discard_weights)
        return self.do(command, deadline_s=deadline_s)

    def resume_engines(
        self, only: str | None = None, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[ResumeReport]:
        """Restore all released memory, or the resource `only`."""
        return self.do(Resume(only=only), deadline_s=deadline_s)

    def set_generation_epoch(
        self, version: int, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[None]:
        """Set the weights version of paused or suspended engines, without new weights."""
        return self.do(SetGenerationEpoch(version=version), deadline_s=deadline_s)

    def increment_staleness(
        self, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[None]:
        """Set the weights version to the current one + 1, without new weights."""
        return self.do(IncrementStaleness(), deadline_s=deadline_s)

    def stop_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> asyncio.Future[None]:
        """Stop paused or suspended engines for good."""
        return self.do(Stop(), deadline_s=deadline_s)

    def shutdown_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> asyncio.Future[None]:
        """Stop the engines from any state."""
        return self.do(Shutdown(), deadline_s=deadline_s)

    def engine_stats(
        self, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[FleetResults[EngineStats]]:
        """Return a future with each engine's counters. Legal in any state; changes nothing."""
        return self.ask(Stats(), deadline_s=deadline_s)

    def weight_checksums(
        self, start: int = 0, *, deadline_s: float = UPDATE_DEADLINE_S
    ) -> asyncio.Future[FleetResults[WeightChecksums]]:
        """Return a future with each engine's page of checksums, from weight number `start` on."""
        return self.ask(ChecksumWeights(start=start), deadline_s=deadline_s)
