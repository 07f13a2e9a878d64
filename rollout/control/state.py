"""The states of an engine, and the commands that lead from one to another, as data."""

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
    """Four states that an engine rests in, and five that it passes through while a command runs."""

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
class Command:
    """A command is legal in the states `sources` and leads to `target`. While it runs the engine is
    in `transient`.
    """

    sources: tuple[EngineState, ...]
    transient: EngineState
    target: EngineState


_S = EngineState
COMMANDS: dict[str, Command] = {
    "pause": Command((_S.RUNNING,), _S.PAUSING, _S.PAUSED),
    "unpause": Command((_S.PAUSED,), _S.UNPAUSING, _S.RUNNING),
    "suspend": Command((_S.PAUSED,), _S.SUSPENDING, _S.SUSPENDED),
    "resume": Command((_S.SUSPENDED,), _S.RESUMING, _S.PAUSED),
    "stop": Command((_S.PAUSED, _S.SUSPENDED), _S.STOPPING, _S.STOPPED),
}


def legal_commands(state: EngineState) -> list[str]:
    """Return the commands that are not refused in `state`; some of them may have nothing to do."""
    return [name for name, c in COMMANDS.items() if state in c.sources or state is c.target]


class StateMachine:
    """The state of one engine. A command that fails leaves the state it found."""

    def __init__(self, state: EngineState = EngineState.RUNNING) -> None:
        self.state = state

    def require(self, *states: EngineState, to: str) -> None:
        """Raise EngineStateError unless in one of `states`; `to` says what was asked for."""
        if self.state not in states:
            wanted = " or ".join(state.name for state in states)
            raise EngineStateError(
                f"cannot {to} while {self.state.name}: the engine must be {wanted}; "
                f"legal commands now: {', '.join(legal_commands(self.state)) or 'none'}"
            )

    @contextmanager
    def command(self, name: str) -> Iterator[bool]:
        """Run a command's work inside `with machine.command("suspend") as must_run`.

        Yields False if the engine is in the target state already. Raises EngineStateError if the
        command is not legal.
        """
        command, before = COMMANDS[name], self.state
        if before is command.target:
            yield False
            return
        self.require(*command.sources, to=name)
        start = time.perf_counter()
        self.state = command.transient
        try:
            yield True
        except BaseException:
            self.state = before
            raise
        self.state = command.target
        seconds = time.perf_counter() - start
        logger.info("%s -> %s in %.4f s", before.name, self.state.name, seconds)
