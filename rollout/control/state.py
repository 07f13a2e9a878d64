"""The states of an engine and of a fleet, and which control call is legal in which state."""

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
    """Four states between control calls, and five transient ones while a call works."""

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
    """In which states a control call is legal, and what becomes of the state.

    name: the call's name in error messages. sources: states in which the call does its work.
    transient: the state while it works. target: the state afterwards, in which the call is legal,
    too, and finds its work done; None if the call leaves the state as it is.
    """

    name: str
    sources: tuple[EngineState, ...]
    transient: EngineState | None = None
    target: EngineState | None = None

    def is_legal_in(self, state: EngineState) -> bool:
        return state in self.sources or state is self.target


_S = EngineState
QUIET = (_S.PAUSED, _S.SUSPENDED)  # the states in which no step runs and a call can follow
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
    """Return the names of the control calls that are legal in `state`."""
    return [transition.name for transition in TRANSITIONS if transition.is_legal_in(state)]


class StateMachine:
    """The state of one engine, or the state that all engines of a fleet have reached."""

    def __init__(
        self, state: EngineState = EngineState.RUNNING, subject: str = "the engine"
    ) -> None:
        """`subject`: whose state it is, for error messages."""
        self.state = state
        self._subject = subject

    def require(self, *states: EngineState, to: str, why: str = "") -> None:
        """Raise EngineStateError unless in one of `states`. `to`: what was asked for. `why`: a
        further reason for the refusal."""
        if self.state not in states:
            wanted = " or ".join(state.name for state in states)
            reason = why or f"{self._subject} must be {wanted}"
            raise EngineStateError(
                f"cannot {to} while {self.state.name}: {reason}; legal commands now: "
                f"{', '.join(legal_commands(self.state))}"
            )

    def require_legal(self, transition: Transition) -> None:
        """Raise EngineStateError, with the state and the legal commands, unless the call is
        legal."""
        if self.state is not transition.target:
            self.require(*transition.sources, to=transition.name)

    def require_update(self, *, in_flight: bool) -> None:
        """Raise EngineStateError unless weights may be updated now. `in_flight`: also between two
        steps."""
        if not (in_flight and self.state in UPDATE_IN_FLIGHT.sources):
            self.require(*UPDATE_WEIGHTS.sources, to="update weights")

    def enter(self, transition: Transition) -> None:
        """Take the target state of a call that has done its work."""
        if transition.target is not None:
            self.state = transition.target

    @contextmanager
    def command(self, transition: Transition) -> Iterator[bool]:
        """Do a call's work inside `with machine.command(SUSPEND) as must_run`.

        Yields False in the call's target state. Raises EngineStateError if the call is not legal.
        If the work raises, the state is again what it was.
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
