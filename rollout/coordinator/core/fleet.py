"""Fleet: the state that all engines have confirmed, the weights that all serve, and which command
is legal when: the coordinator's side of engine/state.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import Any

from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import (
    Command,
    UpdateWeights,
    WeightsSource,
)
from rollout.engine.state import COMMANDS, EngineState, legal_commands
from rollout.errors import EngineStateError, InvalidRequestError, WeightUpdateError

STATE_COMMANDS: Mapping[Headers, str] = {
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
    """Changes when all engines have confirmed. STOPPING is final."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()
    STOPPING = auto()

    @property
    def engine_state(self) -> EngineState:
        """The state that every engine is in."""
        return EngineState.STOPPED if self is CoordinatorState.STOPPING else EngineState[self.name]


def state_of(engine_state: EngineState) -> CoordinatorState:
    """The coordinator's state when every engine is in `engine_state`."""
    if engine_state is EngineState.STOPPED:
        return CoordinatorState.STOPPING
    return CoordinatorState[engine_state.name]


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """What every engine serves. checksum: "" if nobody has said it. source: where a joining engine
    gets it, None before the first commit."""

    version: int
    checksum: str
    source: WeightsSource | None


@dataclass(slots=True)
class Fleet:
    """weights: None until an engine or a commit says. released: owners whose memory a SUSPEND gave
    back. is_diverged: a command was done by some engines and not by others, or one came to a
    suspended fleet, so that engines may be in another state or hold other memory than is known."""

    state: CoordinatorState = CoordinatorState.RUNNING
    weights: CommittedWeights | None = None
    released: frozenset[str] = frozenset()
    is_diverged: bool = False
    command_ids: Iterator[int] = field(default_factory=count)

    @property
    def weights_version(self) -> int:
        return 0 if self.weights is None else self.weights.version


# ---- commands

_QUIET = (CoordinatorState.PAUSED, CoordinatorState.SUSPENDED)


def name_of(message: Command | UpdateWeights) -> str:
    return message.header.name if isinstance(message, Command) else "UPDATE_WEIGHTS"


def legal_now(state: CoordinatorState) -> list[str]:
    """The commands that are answered in `state`."""
    commands = legal_commands(state.engine_state)
    if state in _QUIET:
        commands += ["set_generation_epoch", "increment_staleness", "update_weights"]
    elif state is CoordinatorState.RUNNING:
        commands += ["update_weights with in_flight=True"]
    return [*commands, "stats", "shutdown"]


def is_done(fleet: Fleet, header: Headers) -> bool:
    """Whether every engine is where the command would lead, whatever its arguments.

    A SUSPEND may name what is not released yet, so engines are asked.
    """
    name = STATE_COMMANDS.get(header)
    if name is None or fleet.is_diverged or header is Headers.SUSPEND:
        return False
    return COMMANDS[name].target is fleet.state.engine_state


def require_legal(fleet: Fleet, message: Command | UpdateWeights) -> None:
    """Raise EngineStateError, naming the state and the legal commands, if it may not run now."""
    state, why = fleet.state, ""
    if isinstance(message, UpdateWeights):
        is_running_too = message.in_flight and state is CoordinatorState.RUNNING
        is_legal, name = state in _QUIET or is_running_too, "update weights"
    elif message.header in EPOCH_COMMANDS:
        is_legal, name = state in _QUIET, message.header.name
    elif message.header in (Headers.SHUTDOWN, Headers.STATS):
        return
    else:
        command = COMMANDS[STATE_COMMANDS[message.header]]
        is_legal = state.engine_state in (*command.sources, command.target)
        name = message.header.name
        if message.header is Headers.RESUME and message.arguments.get("only") is not None:
            # Engines that hold different memory would come to different states.
            is_legal, name = is_legal and not fleet.is_diverged, "RESUME in part"
            why = "; engines may hold different memory, resume all" if fleet.is_diverged else ""
    if not is_legal:
        raise EngineStateError(
            f"cannot {name} while {state.name}{why}; legal commands now: "
            f"{', '.join(legal_now(state))}"
        )


def require_readable(command: Command) -> None:
    """Raise InvalidRequestError for arguments that the coordinator itself could not go by."""
    release, only = command.arguments.get("release"), command.arguments.get("only")
    if release is not None and not (
        isinstance(release, (list, tuple)) and all(isinstance(owner, str) for owner in release)
    ):
        raise InvalidRequestError(f"release={release!r:.100} must be a list of names")
    if only is not None and not isinstance(only, str):
        raise InvalidRequestError(f"only={only!r:.100} must be a name")


def state_after(fleet: Fleet, command: Command) -> tuple[CoordinatorState, frozenset[str]]:
    """The state, and the owners that are released, once every engine has done `command`.

    An engine that was resumed in part stays suspended until all is back.
    """
    if command.header is Headers.SUSPEND:
        asked = command.arguments.get("release")
        released = frozenset(_DEFAULT_RELEASE if asked is None else asked)
        return CoordinatorState.SUSPENDED, released | fleet.released
    if command.header is Headers.RESUME and fleet.state is CoordinatorState.SUSPENDED:
        only = command.arguments.get("only")
        left = frozenset() if only is None else fleet.released - {only}
        return (CoordinatorState.SUSPENDED if left else CoordinatorState.PAUSED), left
    return state_of(COMMANDS[STATE_COMMANDS[command.header]].target), frozenset()


def next_epoch(fleet: Fleet, command: Command) -> int:
    """The version that an epoch command sets. Raises InvalidRequestError unless it is a legal
    number above the current one."""
    current = fleet.weights_version
    version: Any = current + 1
    if command.header is Headers.SET_GENERATION_EPOCH:
        version = command.arguments.get("version")
    if type(version) is not int or not current < version <= _MAX_VERSION:
        raise InvalidRequestError(
            f"version={version!r} must be an integer above the current version {current}"
        )
    return version


def next_version(fleet: Fleet, message: UpdateWeights) -> int:
    """The version that an update commits. Raises WeightUpdateError unless above the current."""
    current = fleet.weights_version
    version = current + 1 if message.version is None else message.version
    if not current < version <= _MAX_VERSION:
        raise WeightUpdateError(
            f"version={version} must be above the current version {current}; the serving weights "
            "are kept"
        )
    return version
