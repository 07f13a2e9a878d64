"""The commands of engines and fleets, such as pause, suspend and stats.

A command is a struct: its fields are the arguments, `transition` has the states in which it is
legal, and `run` calls the engine's method. Every engine, runtime, LLM and client executes commands
by one method, `do(command)`. Methods such as `suspend(...)` come from `ControlCalls`,
`AsyncControlCalls` and `ClientControlCalls`, which build the command and pass it to `do`.

Used by `rollout.engine.engine`, `rollout.apis`, `rollout.testing`, `rollout.serve.llm`,
`rollout.cli.top` and `rollout.coordinator`. The coordinator's core and agents receive commands as
messages.

To add an argument, add a field to the struct, pass it on in `run`, and add it to the methods below.
A new command is a new struct in COMMANDS, with an unused tag, and a Transition in
rollout/control/state.py.
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

    state: the name of the fleet's state after the command.
    weights_checksum: checksum of the weights that all engines serve; "" if unknown.
    by_rank: each engine's result by its rank; empty if the command did not run on engines.
    lost_ranks: ranks of engines that disconnected meanwhile.
    num_queued: requests that wait for an engine.
    refused: number of connections and peers that the coordinator refused, by reason; only for
        Stats.
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

    command_id: number of the command, which the sender chooses. The coordinator runs each number
        once; a repeated message gets the earlier answer.
    deadline_s: seconds until the answer is due; None takes the coordinator's `command_deadline_s`.

    An engine in this process ignores `command_id` and `deadline_s`.
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
        """Convert a coordinator's answer to FleetResults of this command's result type. Raises
        ProtocolError if the answer is malformed."""
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

    uses_weights: whether the command waits while an engine in this process stages an update. Such a
        command reads or moves the weights, changes their version, or stops the engine.
    ends_staging: whether an engine of a fleet cancels the staging of an update when the command
        arrives. Such a command moves the weights' memory or stops the engine.
    """

    uses_weights: ClassVar[bool] = False
    ends_staging: ClassVar[bool] = False

    def run(self, engine: ControlledEngine) -> R:
        """Call the method of `engine` that does the work. Raises the errors of that method."""
        raise NotImplementedError


class CommandWithoutResult(Command[None], frozen=True, kw_only=True):
    """A command that returns None."""

    def merged(self, results: FleetResults[None]) -> None:
        return None


class Pause(CommandWithoutResult, frozen=True, kw_only=True, tag=40):
    """Pause between two steps."""

    transition = state.PAUSE

    def run(self, engine: ControlledEngine) -> None:
        engine.pause()


class Unpause(CommandWithoutResult, frozen=True, kw_only=True, tag=41):
    """Let a paused engine generate again."""

    transition = state.UNPAUSE

    def run(self, engine: ControlledEngine) -> None:
        engine.unpause()


class Suspend(Command[SuspendReport], frozen=True, kw_only=True, tag=42):
    """Release memory. Unfinished requests stay.

    mode: a KVCacheManagementMode; None takes the mode of the engine's config.
    release: the resources to release, "kv_cache", "weights" or both.
    discard_weights: keep no copy of the weights.
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
    """Restore released memory. `only` is the one resource to restore; None restores all
    resources."""

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
    """Stop a paused or suspended engine for good. Requests can still be aborted."""

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
    """Stop for good, from any state. Engine processes end."""

    transition = state.SHUTDOWN
    uses_weights = ends_staging = True

    def run(self, engine: ControlledEngine) -> None:
        engine.shutdown()


class Stats(Command[EngineStats], frozen=True, kw_only=True, tag=81):
    """Read counters and state, without changing anything."""

    transition = state.STATS

    def run(self, engine: ControlledEngine) -> EngineStats:
        return engine.stats()

    def merged(self, results: FleetResults[EngineStats]) -> EngineStats:
        fleet_state = engine_state_of(results.state)
        return stats_of_fleet(results.by_rank, fleet_state, results.weights_version)


class ChecksumWeights(Command[WeightChecksums], frozen=True, kw_only=True, tag=85):
    """Read the checksums of one page of weights, from the weight with index `start` on."""

    transition = state.WEIGHT_CHECKSUMS
    uses_weights = True
    start: Count = 0

    def run(self, engine: ControlledEngine) -> WeightChecksums:
        return engine.weight_checksums(self.start)

    def merged(self, results: FleetResults[WeightChecksums]) -> WeightChecksums:
        """Return the checksums that all engines have. Raises EngineStateError if the engines'
        checksums differ, or if there is no engine."""
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
    """Return the results of a Stats command as FleetStats."""
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
        """Run a command on the engine, or on all engines of a fleet. Raises EngineStateError if the
        command is illegal now, and the errors of the engine's method."""
        ...

    def pause(self) -> None:
        """Pause between two steps."""
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
        """Release memory. Unfinished requests stay. The engine must be paused. See
        Engine.suspend."""
        return self.do(Suspend(mode=mode, release=release, discard_weights=discard_weights))

    def resume(self, only: str | None = None) -> ResumeReport:
        """Restore all released memory, or only the resource `only`. The engine is paused after all
        of its memory is restored."""
        return self.do(Resume(only=only))

    def set_generation_epoch(self, version: int) -> None:
        """Set the weights version without new weights. The engine must be paused or suspended."""
        self.do(SetGenerationEpoch(version=version))

    def stats(self) -> EngineStats:
        """Return counters and state of the engine, or merged counters of all engines."""
        return self.do(Stats())


class AsyncControlCalls(Protocol):
    """Commands as coroutine methods. `AsyncLLM`, `ThreadedLLM`, `FakeAsyncLLM` and the Protocol
    `ServedLLM` inherit them."""

    async def do(self, command: Command[R]) -> R:
        """Run a command on the engine, or on all engines of a fleet. Raises EngineStateError if the
        command is illegal now, and the errors of the engine's method."""
        ...

    async def pause(self) -> None:
        """Pause each engine between two of its steps."""
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
        """Release memory. Unfinished requests stay. The engines must be paused. See
        Engine.suspend."""
        return await self.do(Suspend(mode=mode, release=release, discard_weights=discard_weights))

    async def resume(self, only: str | None = None) -> ResumeReport:
        """Restore all released memory, or only the resource `only`. The engines are paused after
        all of their memory is restored."""
        return await self.do(Resume(only=only))

    async def set_generation_epoch(self, version: int) -> None:
        """Set the weights version without new weights. The engines must be paused or suspended."""
        await self.do(SetGenerationEpoch(version=version))

    async def stats(self) -> EngineStats:
        """Return the merged counters of all engines."""
        return await self.do(Stats())


class ClientControlCalls(Protocol):
    """Commands to a fleet as methods that return futures. `InferenceClient` inherits them. A
    command runs even if its future is never awaited. `deadline_s` is the number of seconds that the
    answer may take."""

    def do(
        self, command: Command[R], *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[R]:
        """Run a command on all engines. Returns a future with the merged result. The future raises
        an error if the command was refused. Raises ConfigError for an argument of a wrong type."""
        ...

    def ask(
        self, command: Command[R], *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[FleetResults[R]]:
        """Run a command as `do` does. Returns a future with each engine's own result."""
        ...

    def pause_engines(self, *, deadline_s: float = COMMAND_DEADLINE_S) -> asyncio.Future[None]:
        """Pause each engine between two of its steps."""
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
        """Release memory of paused engines. The arguments are those of Engine.suspend."""
        command = Suspend(mode=mode, release=release, discard_weights=discard_weights)
        return self.do(command, deadline_s=deadline_s)

    def resume_engines(
        self, only: str | None = None, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[ResumeReport]:
        """Restore all released memory, or only the resource `only`."""
        return self.do(Resume(only=only), deadline_s=deadline_s)

    def set_generation_epoch(
        self, version: int, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[None]:
        """Set the weights version of paused or suspended engines, without new weights."""
        return self.do(SetGenerationEpoch(version=version), deadline_s=deadline_s)

    def increment_staleness(
        self, *, deadline_s: float = COMMAND_DEADLINE_S
    ) -> asyncio.Future[None]:
        """Increase the weights version by 1, without new weights."""
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
        """Return a future with each engine's counters. Legal in any state."""
        return self.ask(Stats(), deadline_s=deadline_s)

    def weight_checksums(
        self, start: int = 0, *, deadline_s: float = UPDATE_DEADLINE_S
    ) -> asyncio.Future[FleetResults[WeightChecksums]]:
        """Return a future with each engine's checksums of one page of weights, from index `start`
        on."""
        return self.ask(ChecksumWeights(start=start), deadline_s=deadline_s)
