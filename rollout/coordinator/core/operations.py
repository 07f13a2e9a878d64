"""What one command does with all engines: asks each, waits for each, and says how it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.command_rules import next_epoch, state_after
from rollout.coordinator.core.fleet import CommittedWeights, Fleet
from rollout.coordinator.core.membership import Membership
from rollout.coordinator.core.placement import Placement
from rollout.coordinator.core.sessions import EnginePeer
from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import (
    COMMAND_TYPES,
    Ack,
    Command,
    Message,
    Nack,
    WireError,
)
from rollout.errors import EngineStateError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: with its result, or the error to raise at the client."""

    result: Mapping[str, Any]
    error: WireError | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What operations work with."""

    books: Books
    fleet: Fleet
    placement: Placement
    membership: Membership


class Operation:
    """One command on its way. Each call may end it, and returns the outcome then.

    `members` are the engines asked, by id; `waiting` those that have not answered. An engine that
    is removed meanwhile is neither, and its rank is among `lost_ranks`.
    """

    def __init__(self, parts: Parts, name: str, deadline_at: float) -> None:
        self.parts, self.name, self.deadline_at = parts, name, deadline_at
        self.command_id = next(parts.fleet.command_ids)
        self.members: dict[bytes, EnginePeer] = {}
        self.waiting: dict[bytes, EnginePeer] = {}
        self.lost_ranks: list[int] = []
        self.results: dict[int, Mapping[str, Any]] = {}
        self.refusals: dict[int, WireError] = {}  # by rank, the first one first

    def begin(self, now: float) -> Outcome | None:
        """Ask the engines. Raises RolloutError if it cannot be done at all."""
        raise NotImplementedError

    def complete(self, now: float) -> Outcome | None:
        """All members have answered."""
        raise NotImplementedError

    def timed_out(self, now: float) -> Outcome | None:
        """The deadline has passed, with members that have not answered."""
        raise NotImplementedError

    def answered(self, engine: EnginePeer, answer: Ack | Nack, now: float) -> Outcome | None:
        """A member that was waited for has answered."""
        self.note(engine, answer, now)
        return None if self.waiting else self.complete(now)

    def note(self, engine: EnginePeer, answer: Ack | Nack, now: float) -> None:
        """Keep the answer, by rank."""
        self._waits_no_more(engine, now)
        if isinstance(answer, Ack):
            self.results[engine.rank] = answer.result
        else:
            self.refusals[engine.rank] = _at_rank(engine.rank, answer.error)

    def lost(self, engine: EnginePeer, now: float) -> Outcome | None:
        """An engine has left the fleet."""
        if self.members.get(engine.engine_id) is not engine:
            return None
        del self.members[engine.engine_id]
        self.lost_ranks.append(engine.rank)
        if self.waiting.pop(engine.engine_id, None) is None or self.waiting:
            return None
        return self.complete(now)

    def ask_all(self, message: Message, now: float) -> None:
        """Send to all members, and wait for each of them."""
        for engine in self.members.values():
            self.parts.books.send(engine, message)
            engine.is_awaited = True
        self.waiting = dict(self.members)

    def ask_ready(self, message: Message, now: float) -> Outcome | None:
        """As `ask`, of all that are ready."""
        return self.ask(self.parts.books.sessions.ready_engines(), message, now)

    def ask(self, engines: Iterable[EnginePeer], message: Message, now: float) -> Outcome | None:
        """Make members of these engines, and ask them; complete at once if there are none."""
        self.members = {engine.engine_id: engine for engine in engines}
        self.ask_all(message, now)
        return None if self.waiting else self.complete(now)

    def stop_waiting(self, now: float) -> list[EnginePeer]:
        """Returns the members that have not answered."""
        silent = list(self.waiting.values())
        for engine in silent:
            self._waits_no_more(engine, now)
        return silent

    def _waits_no_more(self, engine: EnginePeer, now: float) -> None:
        del self.waiting[engine.engine_id]
        engine.is_awaited, engine.progress_at = False, now

    def done(self) -> Outcome:
        """The outcome where it was done. Map keys travel as strings."""
        return Outcome(
            {
                "state": self.parts.fleet.state.name,
                "weights_version": self.parts.fleet.weights_version,
                "ranks": {str(rank): result for rank, result in sorted(self.results.items())},
                "lost_ranks": self.lost_ranks,
            }
        )

    def refused(self) -> Outcome:
        """The outcome with the first refusal."""
        return Outcome({}, next(iter(self.refusals.values())))

    def unanswered(self, silent: list[EnginePeer], ending: str) -> Outcome:
        """The outcome where the deadline has passed."""
        ranks = ", ".join(str(engine.rank) for engine in silent)
        error = EngineStateError(f"{self.name}: no answer in time from rank {ranks}; {ending}")
        return Outcome({}, WireError.of(error))


class StateChange(Operation):
    """PAUSE, UNPAUSE, SUSPEND, RESUME, STOP. The state changes when all have confirmed.

    If only some have, it does not, and the fleet is diverged: the command can be repeated, or its
    reverse given, and engines that are there already answer done.
    """

    def __init__(self, parts: Parts, command: Command, deadline_at: float) -> None:
        super().__init__(parts, command.header.name, deadline_at)
        self._command = command

    def begin(self, now: float) -> Outcome | None:
        seconds_left = self.deadline_at - now
        own = structs.replace(self._command, command_id=self.command_id, deadline_s=seconds_left)
        return self.ask_ready(own, now)

    def complete(self, now: float) -> Outcome:
        fleet = self.parts.fleet
        if self.refusals:
            fleet.is_diverged |= bool(self.results)
            return self.refused()
        before = fleet.state
        fleet.state, fleet.released = state_after(fleet, self._command)
        if self._command.header is not Headers.SUSPEND:
            # What engines that were suspended before have released, a repetition does not say.
            fleet.is_diverged = False
        logger.info("%s -> %s", before.name, fleet.state.name)
        return self.done()

    def timed_out(self, now: float) -> Outcome:
        silent = self.stop_waiting(now)
        self.parts.fleet.is_diverged = True
        return self.unanswered(silent, f"the fleet stays {self.parts.fleet.state.name}")


class EpochChange(Operation):
    """SET_GENERATION_EPOCH, INCREMENT_STALENESS: the same weights under a later number.

    Unless every engine has refused, the number is taken: an engine that has not confirmed is
    removed, and gets it when it comes again.
    """

    def __init__(self, parts: Parts, command: Command, deadline_at: float) -> None:
        super().__init__(parts, command.header.name, deadline_at)
        self._version = next_epoch(parts.fleet, command)

    def begin(self, now: float) -> Outcome | None:
        command = COMMAND_TYPES[Headers.SET_GENERATION_EPOCH](
            command_id=self.command_id,
            arguments={"version": self._version},
            deadline_s=self.deadline_at - now,
        )
        return self.ask_ready(command, now)

    def complete(self, now: float) -> Outcome:
        if not self.refusals:
            self._take(now)
            return self.done()
        if self.results or self.lost_ranks:
            self._take(now)
        return self.refused()

    def timed_out(self, now: float) -> Outcome:
        silent = self.stop_waiting(now)
        self._take(now)
        return self.unanswered(silent, f"it was removed; the version is {self._version}")

    def _take(self, now: float) -> None:
        fleet = self.parts.fleet
        old = fleet.weights or CommittedWeights(0, "", None)
        fleet.weights = replace(old, version=self._version)
        for engine in list(self.members.values()):
            if engine.rank in self.results:
                engine.weights_version = self._version
            else:
                self.parts.membership.remove(engine, f"{self.name} was not confirmed", now)
        self.parts.placement.weights_changed(self.members.values())


class Question(Operation):
    """STATS: the same command to every engine, in whatever state, which changes nothing here."""

    def __init__(
        self, parts: Parts, command: Command, deadline_at: float, ending: str = "ask again"
    ) -> None:
        super().__init__(parts, command.header.name, deadline_at)
        self._command, self._ending = command, ending

    def begin(self, now: float) -> Outcome | None:
        seconds_left = self.deadline_at - now
        own = structs.replace(self._command, command_id=self.command_id, deadline_s=seconds_left)
        return self.ask(self._asked(), own, now)

    def _asked(self) -> Iterable[EnginePeer]:
        return self.parts.books.sessions.ready_engines()

    def complete(self, now: float) -> Outcome:
        return self.refused() if self.refusals else self.done()

    def timed_out(self, now: float) -> Outcome:
        return self.unanswered(self.stop_waiting(now), self._ending)


class Shutdown(Question):
    """The end, in whatever state the engines are, and whatever they answer."""

    def __init__(self, parts: Parts, command: Command, deadline_at: float) -> None:
        super().__init__(parts, command, deadline_at, "the coordinator ends all the same")

    def _asked(self) -> Iterable[EnginePeer]:
        """Those that have no work yet, too: they would look for the coordinator for ever."""
        return self.parts.books.sessions.engines.values()


def _at_rank(rank: int, error: WireError) -> WireError:
    """The same error, saying whose it is."""
    return structs.replace(error, message=f"rank {rank}: {error.message or error.type_name}")
