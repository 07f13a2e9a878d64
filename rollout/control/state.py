"""The states of an engine and of a fleet, and the states in which each command is legal.

A StateMachine keeps one state. `Engine`, the coordinator's `Fleet` and the fakes of
`rollout.testing` own one each, and change their state through it alone. `rollout.control.commands`
names the transitions; the APIs, the server and trainers read `EngineState`.
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
    """State of an engine. All but the first four are visible only while a command runs."""

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

    name: the command's name in error messages. sources: the states from which it changes the state,
    or in which it is legal if it changes none. transient: the state while it runs. target: the
    state afterwards, in which the command is also legal; None if it does not change the state.
    """

    name: str
    sources: tuple[EngineState, ...]
    transient: EngineState | None = None
    target: EngineState | None = None

    def is_legal_in(self, state: EngineState) -> bool:
        """Return whether the command may run in `state`."""
        return state in self.sources or state is self.target


_S = EngineState
QUIET = (_S.PAUSED, _S.SUSPENDED)  # no step runs, and the engine can go on later
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
        """Start in `state`. `subject`: name of the state's owner in error messages."""
        self.state = state
        self._subject = subject

    def require(self, *states: EngineState, to: str, why: str = "") -> None:
        """Raise EngineStateError, "cannot {to} while ...", unless the state is one of `states`.

        `why`: the reason in the message; by default that the state must be one of `states`.
        """
        if self.state not in states:
            wanted = " or ".join(state.name for state in states)
            reason = why or f"{self._subject} must be {wanted}"
            raise EngineStateError(
                f"cannot {to} while {self.state.name}: {reason}; legal commands now: "
                f"{', '.join(legal_commands(self.state))}"
            )

    def require_legal(self, transition: Transition) -> None:
        """Raise EngineStateError, with the state and the legal commands, unless the command is
        legal."""
        if self.state is not transition.target:
            self.require(*transition.sources, to=transition.name)

    def require_update(self, *, in_flight: bool) -> None:
        """Raise EngineStateError unless weights may be updated now. `in_flight` allows RUNNING,
        too."""
        if not (in_flight and self.state in UPDATE_IN_FLIGHT.sources):
            self.require(*UPDATE_WEIGHTS.sources, to="update weights")

    def enter(self, transition: Transition) -> None:
        """Change to the target state, if there is one, of a command that has done its work."""
        if transition.target is not None:
            self.state = transition.target

    @contextmanager
    def command(self, transition: Transition) -> Iterator[bool]:
        """Change the state around the work of a command: `with machine.command(...) as must_run`.

        Yields False, and changes nothing, if the state is the command's target already. Raises
        EngineStateError if the command is illegal. If the block raises, restores the former state.
        """
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
