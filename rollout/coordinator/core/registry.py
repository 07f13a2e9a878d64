"""Registry: the sessions of engines, their ranks, and how an engine comes in and goes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rollout.coordinator.core.context import Context
from rollout.coordinator.core.dispatcher import Dispatcher
from rollout.coordinator.core.fleet import CommittedWeights, CoordinatorState, Fleet
from rollout.coordinator.core.limits import num_ahead
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.request_table import Request, RequestTable
from rollout.coordinator.core.sessions import EngineSession, RecentIds
from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import (
    COMMAND_TYPES,
    Disconnect,
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
class _Registration:
    """An engine that is not admitted yet. `left`: the requests of its session before."""

    identity: bytes
    message: Register
    left: list[Request]


class Registry:
    """The only writer of engine sessions. `engines`: by engine id. `departed`: those that left, for
    the commands that wait for them; emptied by the core."""

    def __init__(
        self,
        context: Context,
        table: RequestTable,
        dispatcher: Dispatcher,
        requests: RequestLifecycle,
        fleet: Fleet,
        coordinator_id: bytes,
        *,
        num_awaited: int,
    ) -> None:
        """`num_awaited`: engines to wait for before the first is admitted, so that ranks follow the
        order of engine ids and not of arrival; 1 admits each as it comes."""
        self.context, self.dispatcher, self.fleet = context, dispatcher, fleet
        self._table, self._requests = table, requests
        self._coordinator_id, self._num_awaited = coordinator_id, num_awaited
        self.engines: dict[bytes, EngineSession] = {}
        self.by_identity: dict[bytes, EngineSession] = {}
        self.departed: list[EngineSession] = []
        self._registered: dict[bytes, _Registration] = {}
        self._joining: dict[bytes, EngineSession] = {}  # admitted, without work yet
        self._rank_of_engine: OrderedDict[bytes, int] = OrderedDict()
        self._refused: RecentIds[bytes] = RecentIds(context.limits.max_engines)

    @property
    def is_settled(self) -> bool:
        """Whether nobody has come or gone since, nor is about to."""
        return not (self.departed or self._registered or self._joining)

    def ready_engines(self) -> Iterator[EngineSession]:
        """In the order in which they joined."""
        return (engine for engine in self.engines.values() if engine.is_ready)

    # ---- coming

    def register(self, identity: bytes, message: Register, now: float) -> None:
        """Let an engine wait to be admitted by `settle`, or say why it is not.

        A former session of it ends; what that had is kept for the engine until then.
        """
        former = self.engines.get(message.engine_id)
        refusal = self._refusal(message)
        if refusal is not None:
            if self._refused.add(message.engine_id):
                logger.warning("engine %s refused: %s", message.engine_id.hex()[:8], refusal)
            self.context.outbox.append((identity, nack_of(None, refusal)))
            if former is not None:
                self.remove(former, "it may not register again", now, is_told=False)
            return
        here = self.by_identity.get(identity)
        if here is not None and here is not former:
            self.remove(here, "another engine has its socket", now, is_told=False)
        earlier = self._registered.pop(message.engine_id, None)
        left = [] if earlier is None else earlier.left
        if former is not None:
            left = self._end_session(former, now)
        self._registered[message.engine_id] = _Registration(identity, message, left)

    def _refusal(self, message: Register) -> RolloutError | None:
        weights, version = self.fleet.weights, message.weights_version
        if self.fleet.state is CoordinatorState.STOPPING:
            return EngineStateError("the fleet is stopped; no engine is taken any more")
        num_others = len({*self.engines, *self._registered} - {message.engine_id})
        if num_others >= self.context.limits.max_engines:
            return RolloutError(f"{num_others} engines are there, no more are taken")
        if weights is None:
            return None
        if version > weights.version:
            return WeightUpdateError(
                f"the engine serves version {version}, the fleet {weights.version}; versions only "
                "rise"
            )
        if not (message.weights_checksum and weights.checksum) or (
            message.weights_checksum == weights.checksum
        ):
            return None
        if version == weights.version:
            return WeightUpdateError(
                f"the engine's weights of version {version} have the checksum "
                f"{message.weights_checksum!r}, those of the fleet {weights.checksum!r}"
            )
        if weights.source is None:
            return WeightUpdateError(
                f"the engine serves version {version}, the fleet {weights.version}, and nobody has "
                "published that; start the engine with it"
            )
        return None

    def settle(self, now: float) -> None:
        """Admit who has registered, and let those that serve the fleet's weights have work.

        To be called while no command runs, so that its members stay the same.
        """
        if len(self._registered) >= self._num_awaited:
            self._num_awaited = 1
            for engine_id in sorted(self._registered):
                self._admit(self._registered.pop(engine_id), now)
        for engine in list(self._joining.values()):
            assert self.fleet.weights is not None
            if engine.expected != self._expected():
                # A registration is answered once: another one gets what is right by now.
                reason = "the fleet moved on before it had joined"
                self.remove(engine, reason, now, suspects=())
            elif engine.weights_version == self.fleet.weights.version:
                del self._joining[engine.engine_id]
                engine.progress_at = now
                self.dispatcher.engine_ready(engine)

    def _admit(self, registration: _Registration, now: float) -> None:
        message, limits = registration.message, self.context.limits
        refusal = self._refusal(message)  # what the fleet serves may have changed
        if refusal is not None:
            self.context.outbox.append((registration.identity, nack_of(None, refusal)))
            self._requests.requeue(registration.left, now)
            return
        engine = EngineSession(
            engine_id=message.engine_id,
            identity=registration.identity,
            rank=self._assign_rank(message.engine_id),
            weights_version=message.weights_version,
            weights_checksum=message.weights_checksum,
            max_held=message.max_requests + num_ahead(message.max_requests),
            last_seen=now,
            progress_at=now,
        )
        self.engines[engine.engine_id] = self.by_identity[engine.identity] = engine
        self.dispatcher.reclaim(engine, message.running)
        self._note_weights(engine)
        if self.fleet.state is CoordinatorState.SUSPENDED:
            # A fresh engine gives its KV up; one that is suspended may have missed a resume.
            was_suspended = message.state == EngineState.SUSPENDED.name
            self.fleet.is_diverged |= was_suspended or "kv_cache" not in self.fleet.released
        self._instruct(engine, message.prepared_command_id)
        self._joining[engine.engine_id] = engine
        self.context.timers.set(("engine", engine.engine_id), now)
        if ("probe", 0) not in self.context.timers:
            self.context.timers.set(("probe", 0), now + limits.probe_interval_s)
        self.context.counters.num_engines_joined += 1
        logger.info("%s joined with %d requests", engine, len(engine.server_ids))
        self._requests.requeue(registration.left, now)

    def _assign_rank(self, engine_id: bytes) -> int:
        """The engine's earlier rank if nobody has it now, else the lowest that nobody has."""
        taken = {engine.rank for engine in self.engines.values()}
        rank = self._rank_of_engine.pop(engine_id, -1)
        if rank < 0 or rank in taken:
            rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        self._rank_of_engine[engine_id] = rank
        if len(self._rank_of_engine) > self.context.limits.max_engines:
            self._rank_of_engine.popitem(last=False)
        return rank

    def _expected(self) -> tuple[str, int]:
        return self.fleet.state.name, self.fleet.weights_version

    def _note_weights(self, engine: EngineSession) -> None:
        """The first engine says what the fleet serves, or what its checksum is."""
        fleet, checksum = self.fleet, engine.weights_checksum
        if fleet.weights is None:
            fleet.weights = CommittedWeights(engine.weights_version, checksum, None)
        elif not fleet.weights.checksum:
            fleet.weights = replace(fleet.weights, checksum=checksum)

    def _instruct(self, engine: EngineSession, prepared_command_id: int | None) -> None:
        """Say what to be. Whatever is sent after it finds the engine so."""
        fleet, weights, limits = self.fleet, self.fleet.weights, self.context.limits
        assert weights is not None
        engine.expected = self._expected()
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
            keep=tuple(request.current_attempt() for request in self._table.assigned(engine)),
        )
        self.context.send(engine, ack)
        if prepared_command_id is not None and ack.weights is None:
            # Had it been committed, there would be a source, and what is fetched replaces it.
            rollback = Rollback(command_id=prepared_command_id, version=weights.version)
            self.context.send(engine, rollback)
        if is_renumbered:
            self._command(engine, Headers.SET_GENERATION_EPOCH, {"version": weights.version})
            if is_running:
                self._command(engine, Headers.UNPAUSE, {})

    def _command(
        self, engine: EngineSession, header: Headers, arguments: Mapping[str, int]
    ) -> None:
        command_id = next(self.fleet.command_ids)
        command = COMMAND_TYPES[header](command_id=command_id, arguments=arguments)
        self.context.send(engine, command)

    # ---- staying

    def heartbeat(self, engine: EngineSession, message: Heartbeat, now: float) -> None:
        """Note the status, and answer."""
        status = message.status
        if status is not None:
            before, engine.status = engine.status, status
            has_work = status.num_waiting + status.num_running > 0
            is_stepping = status.state == EngineState.RUNNING.name and has_work
            has_stepped = before is None or status.num_steps != before.num_steps
            if has_stepped or not is_stepping or not engine.is_ready or engine.num_awaited:
                engine.progress_at = now
            if not engine.is_ready:
                engine.weights_version = status.weights_version
        self.context.send(engine, Heartbeat(sequence=message.sequence))

    def check(self, engine_id: bytes, now: float) -> None:
        """Remove the engine if one of its deadlines has passed, else look again at the next."""
        engine, limits = self.engines[engine_id], self.context.limits
        lease_end = engine.last_seen + limits.engine_lease_s
        progress_end = engine.progress_at + limits.progress_deadline_s
        if engine.num_awaited or not engine.is_ready:
            progress_end = now + limits.progress_deadline_s
        if now >= lease_end:
            self.remove(engine, f"not heard for {now - engine.last_seen:.1f} s", now)
        elif now >= progress_end:
            self.remove(engine, f"no step for {now - engine.progress_at:.1f} s", now)
        else:
            self.context.timers.set(("engine", engine_id), min(lease_end, progress_end))

    def probe(self, _: int, now: float) -> None:
        """Send each engine a heartbeat that answers nothing: the system knows at once that a
        process has ended, but says so only to whoever sends to it."""
        for engine in self.engines.values():
            self.context.send(engine, Heartbeat(sequence=0))
        if self.engines:
            self.context.timers.set(("probe", 0), now + self.context.limits.probe_interval_s)

    def stood_still(self, seconds: float) -> None:
        """For so long no engine could be heard."""
        for engine in self.engines.values():
            engine.last_seen += seconds
            engine.progress_at += seconds

    # ---- going

    def disconnect(self, engine: EngineSession, message: Disconnect, now: float) -> None:
        """It says goodbye, and if it failed, what it was running then."""
        named = {(attempt.request_id, attempt.attempt) for attempt in message.suspects}
        held = self._table.assigned(engine)
        suspects = [request for request in held if (request.server_id, request.attempt) in named]
        reason = f"it said goodbye: {message.reason}"
        is_fault = message.is_fault
        self.remove(engine, reason, now, suspects=suspects if is_fault else (), is_told=False)

    def remove(
        self,
        engine: EngineSession,
        reason: str,
        now: float,
        *,
        suspects: Sequence[Request] | None = None,
        is_told: bool = True,
    ) -> None:
        """The engine is out: its requests go to others. `suspects`: those that may be why; None for
        all that it may have been running. An engine that is told can come again."""
        level = logging.INFO if suspects == () else logging.WARNING
        logger.log(level, "%s left: %s", engine, reason)
        self.context.counters.num_engines_lost += 1
        if suspects is None:
            suspects = self.dispatcher.suspects(engine)
        if is_told:
            refusal = nack_of(None, RolloutError(f"{reason}; register again"))
            self.context.send(engine, refusal)
        self._requests.count_loss(suspects)
        self._requests.requeue(self._end_session(engine, now), now)

    def _end_session(self, engine: EngineSession, now: float) -> list[Request]:
        """Forget the session; returns the requests that it leaves."""
        del self.engines[engine.engine_id]
        if self.by_identity.get(engine.identity) is engine:
            del self.by_identity[engine.identity]
        self._joining.pop(engine.engine_id, None)
        self.context.timers.discard(("engine", engine.engine_id))
        self.context.forget_engine(engine)
        self.departed.append(engine)
        return self.dispatcher.engine_left(engine, now)
