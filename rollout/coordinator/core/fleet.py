"""Fleet: the state that all engines have confirmed, the weights that they serve, and which commands
are legal in each state (the counterpart of control/state.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import count

from rollout.control.state import COMMANDS, EngineState, legal_commands
from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import Command, UpdateWeights
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.weights.source import WeightsSource

_STATE_COMMANDS: Mapping[Headers, str] = {
    Headers.PAUSE: "pause",
    Headers.UNPAUSE: "unpause",
    Headers.SUSPEND: "suspend",
    Headers.RESUME: "resume",
    Headers.STOP: "stop",
}
EPOCH_COMMANDS = (Headers.SET_GENERATION_EPOCH, Headers.INCREMENT_STALENESS)
_MAX_VERSION = 2**31 - 1
_DEFAULT_RELEASE = ("kv_cache",)


class CoordinatorState(Enum):
    """The state of the fleet. It changes once all engines have confirmed. STOPPING is final."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()
    STOPPING = auto()

    @property
    def engine_state(self) -> EngineState:
        """The state that every engine is in."""
        return EngineState.STOPPED if self is CoordinatorState.STOPPING else EngineState[self.name]


_QUIET = (CoordinatorState.PAUSED, CoordinatorState.SUSPENDED)


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
    """The state of all engines together. Its methods are the only writers of weights and settings.

    released: resources whose memory a SUSPEND has released. is_diverged: engines may be in another
    state or hold other memory than is known, because only some have done a command, or because one
    joined a suspended fleet. command_ids: the ids of commands towards engines.
    """

    state: CoordinatorState = CoordinatorState.RUNNING
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
    def weights_version(self) -> int:
        return 0 if self.weights is None else self.weights.version

    @property
    def weights_checksum(self) -> str:
        """That of the weights which every engine serves, "" as long as no engine has joined."""
        return "" if self.weights is None else self.weights.checksum

    def difference(self, settings: Mapping[str, str]) -> str:
        """Return in what an engine of these settings differs from the first one, for an error
        message; "" if in nothing, or if there was no engine."""
        if self._settings is None:
            return ""
        own = self._settings
        names = [name for name in {**own, **settings} if settings.get(name) != own.get(name)]
        listed = [f"{name}={settings.get(name)}, the fleet {own.get(name)}" for name in names[:3]]
        return "; ".join(listed) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")

    def is_done(self, header: Headers) -> bool:
        """Whether every engine is in the command's target state already.

        Always False for SUSPEND, which may name memory that is not released yet.
        """
        if self.is_diverged or header is Headers.SUSPEND:
            return False
        return COMMANDS[_STATE_COMMANDS[header]].target is self.state.engine_state

    def require_legal(self, message: Command | UpdateWeights) -> None:
        """Raise EngineStateError, naming the state and the legal commands, if the command may not
        run now, and InvalidRequestError for arguments that the coordinator itself cannot use."""
        state, why = self.state, ""
        if isinstance(message, UpdateWeights):
            is_running_too = message.in_flight and state is CoordinatorState.RUNNING
            is_legal, name = state in _QUIET or is_running_too, "update weights"
        elif message.header in EPOCH_COMMANDS:
            is_legal, name = state in _QUIET, message.header.name
        elif message.header in _STATE_COMMANDS:
            command = COMMANDS[_STATE_COMMANDS[message.header]]
            is_legal = state.engine_state in (*command.sources, command.target)
            name = message.header.name
            if message.header is Headers.RESUME and message.arguments.get("only") is not None:
                # Engines that hold different memory would come to different states.
                is_legal, name = is_legal and not self.is_diverged, "RESUME in part"
                why = "; engines may hold different memory, resume all" if self.is_diverged else ""
        else:
            is_legal, name = True, message.header.name
        if not is_legal:
            raise EngineStateError(
                f"cannot {name} while {state.name}{why}; legal commands now: "
                f"{', '.join(self._legal_commands())}"
            )
        if isinstance(message, Command):
            _require_readable(message)

    def _legal_commands(self) -> list[str]:
        commands = legal_commands(self.state.engine_state)
        if self.state in _QUIET:
            commands += ["set_generation_epoch", "increment_staleness", "update_weights"]
        elif self.state is CoordinatorState.RUNNING:
            commands += ["update_weights with in_flight=True"]
        return [*commands, "stats", "shutdown"]

    def require_next_version(self, version: object, error_type: type[Exception]) -> int:
        """Return `version`; raise `error_type` unless it is an integer above the current one."""
        current = self.weights_version
        if type(version) is not int or not current < version <= _MAX_VERSION:
            raise error_type(
                f"version={version!r} must be an integer above the current version {current}; the "
                "serving weights are kept"
            )
        return version

    def change_state(self, command: Command) -> None:
        """Take the state after a command that every engine has done.

        Engines that were resumed in part stay suspended until all memory is restored.
        """
        if command.header is Headers.SUSPEND:
            asked = command.arguments.get("release")
            self.released |= frozenset(_DEFAULT_RELEASE if asked is None else asked)
            self.state = CoordinatorState.SUSPENDED
            # is_diverged stays: a repeated SUSPEND does not say what engines released before.
            return
        only = command.arguments.get("only")
        is_partial = command.header is Headers.RESUME and only is not None
        self.released = self.released - {only} if is_partial else frozenset()
        target = COMMANDS[_STATE_COMMANDS[command.header]].target
        if target is EngineState.STOPPED:
            self.state = CoordinatorState.STOPPING
        elif not self.released:
            self.state = CoordinatorState[target.name]
        self.is_diverged = False


def _require_readable(command: Command) -> None:
    release, only = command.arguments.get("release"), command.arguments.get("only")
    if release is not None and not (
        isinstance(release, (list, tuple)) and all(isinstance(owner, str) for owner in release)
    ):
        raise InvalidRequestError(f"release={release!r:.100} must be a list of names")
    if only is not None and not isinstance(only, str):
        raise InvalidRequestError(f"only={only!r:.100} must be a name")
