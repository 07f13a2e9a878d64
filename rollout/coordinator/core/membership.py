"""Membership: which engines are there, and how one comes in and goes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollout.coordinator.core.books import Books
from rollout.coordinator.core.bounded_ids import BoundedIds
from rollout.coordinator.core.fleet import CommittedWeights, CoordinatorState, Fleet
from rollout.coordinator.core.placement import Placement
from rollout.coordinator.core.request_desk import RequestDesk
from rollout.coordinator.core.request_table import Phase, Request
from rollout.coordinator.core.sessions import EnginePeer
from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import (
    COMMAND_TYPES,
    Attempt,
    Heartbeat,
    Register,
    RegisterAck,
    Rollback,
    nack_of,
)
from rollout.engine.state import EngineState
from rollout.errors import EngineStateError, RolloutError, WeightUpdateError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Early:
    """A registration. `left_behind`: the requests of the engine's session before."""

    identity: bytes
    message: Register
    left_behind: list[Request]


class Membership:
    """The only writer of engine sessions. `departed`: those that left, for whoever waits for them;
    emptied by the caller."""

    def __init__(
        self,
        books: Books,
        placement: Placement,
        desk: RequestDesk,
        fleet: Fleet,
        *,
        coordinator_id: bytes,
        num_awaited: int,
    ) -> None:
        """`num_awaited`: engines to wait for before the first is taken, so that ranks follow the
        order of engine ids and not of arrival; 1 takes each as it comes."""
        self._books, self._placement, self._desk, self._fleet = books, placement, desk, fleet
        self._coordinator_id = coordinator_id
        self._num_awaited = num_awaited
        self._early: dict[bytes, _Early] = {}  # registered, not yet taken in
        self._refused: BoundedIds[bytes] = BoundedIds(books.limits.max_engines)
        self._joining: dict[bytes, EnginePeer] = {}
        self.departed: list[EnginePeer] = []

    @property
    def is_settled(self) -> bool:
        """Whether nobody has come or gone since, nor is about to."""
        return not (self.departed or self._early or self._joining)

    # ---- coming

    def register(self, identity: bytes, message: Register, now: float) -> None:
        """Let an engine wait to be taken in by `settle`, or say why it is not.

        One that was in already has left with that; what it had waits for it.
        """
        previous = self._books.sessions.engines.get(message.engine_id)
        refusal = self._refusal(message)
        if refusal is not None:
            if self._refused.add(message.engine_id):
                logger.warning("engine %s refused: %s", message.engine_id.hex()[:8], refusal)
            self._books.outbox.append((identity, nack_of(None, refusal)))
            if previous is not None:
                self.remove(previous, "it may not register again", now, tell=False)
            return
        here = self._books.sessions.peer(identity)
        if isinstance(here, EnginePeer) and here is not previous:
            self.remove(here, "another engine has its socket", now, tell=False)
        early = self._early.pop(message.engine_id, None)
        left = early.left_behind if early is not None else []
        if previous is not None:
            left = self._drop(previous)
        self._early[message.engine_id] = _Early(identity, message, left)

    def _refusal(self, message: Register) -> RolloutError | None:
        sessions, weights = self._books.sessions, self._fleet.weights
        if self._fleet.state is CoordinatorState.STOPPING:
            return EngineStateError("the fleet is stopped; no engine is taken any more")
        num_others = len({*sessions.engines, *self._early} - {message.engine_id})
        if num_others >= self._books.limits.max_engines:
            return RolloutError(f"{num_others} engines are there, no more are taken")
        if weights is None:
            return None
        if message.weights_version > weights.version:
            return WeightUpdateError(
                f"the engine serves version {message.weights_version}, the fleet "
                f"{weights.version}; versions only rise"
            )
        if _may_be_equal(message.weights_checksum, weights.checksum):
            return None
        if message.weights_version == weights.version:
            return WeightUpdateError(
                f"the engine's weights of version {weights.version} have the checksum "
                f"{message.weights_checksum!r}, those of the fleet {weights.checksum!r}"
            )
        if weights.source is None:
            return WeightUpdateError(
                f"the engine serves version {message.weights_version}, the fleet "
                f"{weights.version}, and nobody has published that; start the engine with it"
            )
        return None

    def settle(self, now: float) -> None:
        """Take in who has registered, and let those that serve the fleet's weights have work.

        To be called while no command runs, so that its members stay the same.
        """
        if len(self._early) >= self._num_awaited:
            self._num_awaited = 1
            for engine_id in sorted(self._early):
                self._admit(self._early.pop(engine_id), now)
        for engine in list(self._joining.values()):
            assert self._fleet.weights is not None
            if engine.told != self._current():
                # A registration is answered once: another one gets what is right by now.
                reason = "the fleet moved on before it had joined"
                self.remove(engine, reason, now, is_fault=False)
            elif engine.weights_version == self._fleet.weights.version:
                del self._joining[engine.engine_id]
                engine.progress_at = now
                self._placement.engine_ready(engine, now)

    def _admit(self, early: _Early, now: float) -> None:
        message, sessions = early.message, self._books.sessions
        refusal = self._refusal(message)  # what the fleet serves may have changed
        if refusal is not None:
            self._books.outbox.append((early.identity, nack_of(None, refusal)))
            self._let_go(early.left_behind, now)
            return
        engine = EnginePeer(
            engine_id=message.engine_id,
            identity=early.identity,
            rank=sessions.assign_rank(message.engine_id),
            weights_version=message.weights_version,
            weights_checksum=message.weights_checksum,
            max_requests=message.max_requests,
            last_seen=now,
            progress_at=now,
        )
        sessions.add(engine)
        adopted = self._placement.adopt(engine, message.running)
        self._note_weights(engine)
        if self._fleet.state is CoordinatorState.SUSPENDED:
            # A fresh engine gives its KV up; one that is suspended may have missed a resume.
            was_suspended = message.state == EngineState.SUSPENDED.name
            self._fleet.is_diverged |= was_suspended or "kv_cache" not in self._fleet.released
        self._instruct(engine, message.prepared_command_id)
        self._joining[engine.engine_id] = engine
        self._books.timers.set(("engine", engine.engine_id), now)
        self._books.counters.num_engines_joined += 1
        logger.info("%s joined with %d requests", engine, len(adopted))
        self._let_go(early.left_behind, now)
        self._placement.place_all(adopted, now)

    def _current(self) -> tuple[str, int]:
        return self._fleet.state.name, self._fleet.weights_version

    def _note_weights(self, engine: EnginePeer) -> None:
        """The first engine says what the fleet serves, or what its checksum is."""
        fleet, checksum = self._fleet, engine.weights_checksum
        if fleet.weights is None:
            fleet.weights = CommittedWeights(engine.weights_version, checksum, None)
        elif not fleet.weights.checksum:
            fleet.weights = replace(fleet.weights, checksum=checksum)

    def _instruct(self, engine: EnginePeer, prepared_command_id: int | None) -> None:
        """Say what to be. Whatever is sent after it finds the engine so."""
        fleet, weights, limits = self._fleet, self._fleet.weights, self._books.limits
        assert weights is not None
        engine.told = self._current()
        is_behind = engine.weights_version < weights.version
        # The same weights under a later number, which an engine takes only while it is quiet.
        is_renumbered = is_behind and weights.source is None
        is_running = fleet.state is CoordinatorState.RUNNING
        ack = RegisterAck(
            coordinator_id=self._coordinator_id,
            rank=engine.rank,
            state=EngineState.PAUSED.name if is_renumbered and is_running else fleet.state.name,
            lease_s=limits.engine_lease_s,
            heartbeat_s=limits.heartbeat_s,
            progress_deadline_s=limits.progress_deadline_s,
            report_interval_tokens=limits.report_interval_tokens,
            weights_version=weights.version,
            weights=weights.source if is_behind else None,
            keep=tuple(self._attempts_of(engine)),
        )
        self._books.send(engine, ack)
        if prepared_command_id is not None and ack.weights is None:
            # Had it been committed, there would be a source, and what is fetched replaces it.
            rollback = Rollback(command_id=prepared_command_id, version=weights.version)
            self._books.send(engine, rollback)
        if is_renumbered:
            self._command(engine, Headers.SET_GENERATION_EPOCH, {"version": weights.version})
            if is_running:
                self._command(engine, Headers.UNPAUSE, {})

    def _command(self, engine: EnginePeer, header: Headers, arguments: Mapping[str, int]) -> None:
        command_id = next(self._fleet.command_ids)
        command = COMMAND_TYPES[header](command_id=command_id, arguments=arguments)
        self._books.send(engine, command)

    def _attempts_of(self, engine: EnginePeer) -> list[Attempt]:
        requests = [self._books.requests.requests[i] for i in engine.server_ids]
        return [Attempt(request_id=r.server_id, attempt=r.attempt) for r in requests]

    # ---- staying

    def heartbeat(self, engine: EnginePeer, message: Heartbeat, now: float) -> None:
        """Note the status, and answer."""
        status = message.status
        if status is not None:
            before, engine.status = engine.status, status
            has_work = status.num_waiting + status.num_running > 0
            is_stepping = status.state == EngineState.RUNNING.name and has_work
            has_stepped = before is None or status.num_steps != before.num_steps
            if has_stepped or not is_stepping or not engine.is_ready or engine.is_awaited:
                engine.progress_at = now
            if not engine.is_ready:
                engine.weights_version = status.weights_version
        self._books.send(engine, Heartbeat(sequence=message.sequence))

    def check(self, engine_id: bytes, now: float) -> None:
        """Remove the engine if one of its deadlines has passed, else look again at the next."""
        engine, limits = self._books.sessions.engines[engine_id], self._books.limits
        lease_end = engine.last_seen + limits.engine_lease_s
        progress_end = engine.progress_at + limits.progress_deadline_s
        if engine.is_awaited or not engine.is_ready:
            progress_end = now + limits.progress_deadline_s
        if now >= lease_end:
            self.remove(engine, f"not heard for {now - engine.last_seen:.1f} s", now)
        elif now >= progress_end:
            self.remove(engine, f"no step for {now - engine.progress_at:.1f} s", now)
        else:
            self._books.timers.set(("engine", engine_id), min(lease_end, progress_end))

    # ---- going

    def remove(
        self,
        engine: EnginePeer,
        reason: str,
        now: float,
        *,
        tell: bool = True,
        is_fault: bool = True,
    ) -> None:
        """The engine is out: its requests go to others. `tell` it, so that it can come again."""
        logger.log(logging.WARNING if is_fault else logging.INFO, "%s left: %s", engine, reason)
        self._books.counters.num_engines_lost += 1
        if tell:
            self._books.send(engine, nack_of(None, RolloutError(f"{reason}; register again")))
        left = self._drop(engine)
        if is_fault:
            self._desk.engine_lost(left)
        self._let_go(left, now)

    def _drop(self, engine: EnginePeer) -> list[Request]:
        """Forget the session; returns the requests that it leaves behind."""
        self._books.sessions.remove(engine)
        self._books.timers.cancel(("engine", engine.engine_id))
        self._joining.pop(engine.engine_id, None)
        self.departed.append(engine)
        return self._placement.engine_left(engine)

    def _let_go(self, requests: list[Request], now: float) -> None:
        """Place what still waits of these requests anew; those that were being aborted end."""
        table = self._books.requests.requests
        waiting = [
            request
            for request in requests
            if request.phase is Phase.WAITING and table.get(request.server_id) is request
        ]
        for request in waiting:
            if request.abort_error is not None:
                self._desk.fail(request, request.abort_error)
        self._placement.place_all(waiting, now)


def _may_be_equal(checksum: str, other: str) -> bool:
    return not checksum or not other or checksum == other
