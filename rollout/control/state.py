"""The states of an engine or a fleet, and the states in which each command is legal.

A StateMachine holds one state. `rollout.engine.engine`, `rollout.coordinator.core.fleet` and the
fakes in `rollout.testing` each own a StateMachine. `rollout.control.commands` names the
transitions. The APIs, `rollout.serve`, `rollout.tensor_parallel.follower` and `trainer_hooks` read
`EngineState`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from rollout.errors import EngineStateError

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """State of an engine. PAUSING, UNPAUSING, SUSPENDING, RESUMING and STOPPING are transient: they
    are visible only while a command runs."""

    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    PAUSING = "pausing"
    UNPAUSING = "unpausing"
    SUSPENDING = "suspending"
    RESUMING = "resuming"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Transition:
    """The states in which a command is legal, and the states that it leads to.

    name: name of the command in error messages.
    sources: the states in which the command is legal, besides `target`.
    transient: the state while the command runs; None if the state does not change meanwhile.
    target: the state after the command, in which the command is legal and does nothing; None if the
        command does not change the state.
    """

    name: str
    sources: tuple[EngineState, ...]
    transient: EngineState | None = None
    target: EngineState | None = None

    def is_legal_in(self, state: EngineState) -> bool:
        return state in self.sources or state is self.target


_S = EngineState
QUIET = (_S.PAUSED, _S.SUSPENDED)  # no step runs, and the engine can run again
_ANY = tuple(EngineState)
PAUSE = Transition("pause", (_S.RUNNING,), _S.PAUSING, _S.PAUSED)
UNPAUSE = Transition("unpause", (_S.PAUSED,), _S.UNPAUSING, _S.RUNNING)
SUSPEND = Transition("suspend", (_S.PAUSED,), _S.SUSPENDING, _S.SUSPENDED)
RESUME = Transition("resume", (_S.SUSPENDED,), _S.RESUMING, _S.PAUSED)
STOP = Transition("stop", QUIET, _S.STOPPING, _S.STOPPED)
SET_GENERATION_EPOCH = Transition("set_generation_epoch", QUIET)
INCREMENT_STALENESS = Transition("increment_staleness", QUIET)
UPDATE_WEIGHTS = Transition("update_weights", QUIET)
UPDATE_IN_FLIGHT = Transition("update_weights with in_flight=True", (_S.RUNNING,))
STATS = Transition("stats", _ANY)
WEIGHT_CHECKSUMS = Transition("weight_checksums", _ANY)
SHUTDOWN = Transition("shutdown", _ANY)
TRANSITIONS = (
    *(PAUSE, UNPAUSE, SUSPEND, RESUME, STOP, SET_GENERATION_EPOCH, INCREMENT_STALENESS),
    *(UPDATE_WEIGHTS, UPDATE_IN_FLIGHT, STATS, WEIGHT_CHECKSUMS, SHUTDOWN),
)


def legal_commands(state: EngineState) -> list[str]:
    """Return the names of the commands that are legal in `state`."""
    return [transition.name for transition in TRANSITIONS if transition.is_legal_in(state)]


class StateMachine:
    """The state of one engine, or the state that all engines of a fleet have reached."""

    def __init__(
        self, state: EngineState = EngineState.RUNNING, subject: str = "the engine"
    ) -> None:
        """`subject` names the owner of the state in error messages."""
        self.state = state
        self._subject = subject

    def require(self, *states: EngineState, to: str, why: str = "") -> None:
        """Raise EngineStateError("cannot {to} while ...") unless the state is one of `states`.
        `why` replaces the reason in the message, which by default names the wanted states."""
        if self.state not in states:
            wanted = " or ".join(state.name for state in states)
            reason = why or f"{self._subject} must be {wanted}"
            raise EngineStateError(
                f"cannot {to} while {self.state.name}: {reason}; legal commands now: "
                f"{', '.join(legal_commands(self.state))}"
            )

    def require_legal(self, transition: Transition) -> None:
        """Raise EngineStateError unless the command of `transition` is legal in the current
        state."""
        if self.state is not transition.target:
            self.require(*transition.sources, to=transition.name)

    def require_update(self, *, in_flight: bool) -> None:
        """Raise EngineStateError unless weights may be updated now. `in_flight` also allows
        RUNNING."""
        if not (in_flight and self.state in UPDATE_IN_FLIGHT.sources):
            self.require(*UPDATE_WEIGHTS.sources, to="update weights")

    def enter(self, transition: Transition) -> None:
        """Change to the target state of a command that has run. Does nothing if the command has no
        target."""
        if transition.target is not None:
            self.state = transition.target

    @contextmanager
    def command(self, transition: Transition) -> Iterator[bool]:
        """Change the state around the block that does a command's work. Yields False, and changes
        nothing, if the state is already the command's target; else True. Raises EngineStateError if
        the command is illegal. If the block raises, the former state is restored."""
        before = self.state
        if before is transition.target:
            yield False
            return
        self.require_legal(transition)
        start = time.perf_counter()
        if transition.transient is not None:
            self.state = transition.transient
        try:
            yield True
        except BaseException:
            self.state = before
            raise
        self.enter(transition)
        seconds = time.perf_counter() - start
        logger.info("%s -> %s in %.4f s", before.name, self.state.name, seconds)
