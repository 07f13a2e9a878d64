"""Fleet: the state that all engines have confirmed, and the weights that they serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import count
from typing import Any

from rollout.control.commands import (
    Command,
    ControlMessage,
    Resume,
    Suspend,
    engine_state_of,
)
from rollout.control.state import EngineState, StateMachine
from rollout.coordinator.protocol.messages import UpdateWeights
from rollout.weights.source import WeightsSource


class CoordinatorState(Enum):
    """The state of the fleet. It changes once all engines have confirmed. STOPPING is final."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()
    STOPPING = auto()

    @property
    def engine_state(self) -> EngineState:
        """The state that every engine is in."""
        return engine_state_of(self.name)


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """The weights that every engine serves. checksum: "" if it is not known. source: from where a
    joining engine fetches them, None before the first commit. base: of an adapter, the full weights
    below it, None if they are those that engines start with."""

    version: int
    checksum: str
    source: WeightsSource | None
    base: WeightsSource | None = None

    @property
    def full_source(self) -> WeightsSource | None:
        """From where a joining engine fetches the weights without their adapter."""
        if self.source is None or self.source.lora is not None:
            return self.base
        return self.source


@dataclass(slots=True)
class Fleet:
    """The state, the weights and the settings that all engines have in common. Its methods are the
    only writers of weights and settings.

    machine: the state that all engines have confirmed, and the legality of commands. released: the
    resources whose memory a Suspend has released. is_diverged: engines may be in another state or
    hold other memory than is known, because only some have done a command, or because one joined a
    suspended fleet. command_ids: the ids of commands towards engines.
    """

    machine: StateMachine = field(default_factory=lambda: StateMachine(subject="all engines"))
    released: frozenset[str] = frozenset()
    is_diverged: bool = False
    command_ids: Iterator[int] = field(default_factory=count)
    _weights: CommittedWeights | None = None
    _settings: Mapping[str, str] | None = None

    @property
    def weights(self) -> CommittedWeights | None:
        """The weights that every engine serves; None before the first engine or update."""
        return self._weights

    def join(self, version: int, checksum: str, settings: Mapping[str, str]) -> CommittedWeights:
        """Return the weights that a joining engine must serve. The first engine's own weights and
        settings become the fleet's, and so does its checksum while none is known."""
        weights = self._weights or CommittedWeights(version, checksum, None)
        self._weights = weights if weights.checksum else replace(weights, checksum=checksum)
        if self._settings is None:
            self._settings = settings
        return self._weights

    def commit(self, version: int, checksum: str, source: WeightsSource) -> None:
        """Serve the weights of `source`, which every engine has staged. An adapter keeps the full
        weights below it."""
        before = self._weights
        base = before.full_source if source.lora is not None and before is not None else None
        self._weights = CommittedWeights(version, checksum, source, base)

    def renumber(self, version: int) -> None:
        """Serve the same weights under a later version."""
        self._weights = replace(self._weights or CommittedWeights(0, "", None), version=version)

    @property
    def state(self) -> CoordinatorState:
        is_over = self.machine.state is EngineState.STOPPED
        return CoordinatorState.STOPPING if is_over else CoordinatorState[self.machine.state.name]

    @property
    def weights_version(self) -> int:
        return 0 if self.weights is None else self.weights.version

    @property
    def weights_checksum(self) -> str:
        """The checksum of the weights that every engine serves; "" until an engine has joined."""
        return "" if self.weights is None else self.weights.checksum

    def difference(self, settings: Mapping[str, str]) -> str:
        """Return how an engine's settings differ from the first engine's, for an error message; ""
        if they are equal, or if there was no engine."""
        if self._settings is None:
            return ""
        own = self._settings
        names = [name for name in {**own, **settings} if settings.get(name) != own.get(name)]
        listed = [f"{name}={settings.get(name)}, the fleet {own.get(name)}" for name in names[:3]]
        return "; ".join(listed) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")

    def is_done(self, command: Command[Any]) -> bool:
        """Return whether every engine is in the command's target state already.

        Always False for Suspend, which may name memory that is not released yet.
        """
        if self.is_diverged or isinstance(command, Suspend):
            return False
        return self.machine.state is command.transition.target

    def require_legal(self, message: ControlMessage[Any]) -> None:
        """Raise EngineStateError, with the state and the legal commands, unless the call is
        legal."""
        if isinstance(message, UpdateWeights):
            self.machine.require_update(in_flight=message.in_flight)
            return
        if isinstance(message, Resume) and message.only is not None and self.is_diverged:
            # Engines that hold different memory would come to different states.
            why = "engines may hold different memory, resume all"
            self.machine.require(to=f"resume only={message.only!r}", why=why)
        self.machine.require_legal(message.transition)

    def change_state(self, command: Command[Any]) -> None:
        """Take the state after a command that every engine has done.

        Engines that were resumed in part stay suspended until all memory is restored.
        """
        if isinstance(command, Suspend):
            self.released |= frozenset(command.release)
            self.machine.enter(command.transition)
            # is_diverged stays: a repeated Suspend does not say what engines released before.
            return
        only = command.only if isinstance(command, Resume) else None
        self.released = frozenset() if only is None else self.released - {only}
        if not self.released:
            self.machine.enter(command.transition)
        self.is_diverged = False
