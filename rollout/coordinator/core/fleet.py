"""Fleet: the state and weights that all engines have confirmed. Registry: the engines' sessions.

Used by `core`, `clients` and `commands` of `rollout.coordinator.core`, and by
`rollout.coordinator.coordinator` (CoordinatorState). Registry makes and ends EngineSessions and
sets their timers. Messages go to the outbox of the Context.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import count
from typing import Any

from rollout.control.commands import (
    Command,
    ControlMessage,
    Resume,
    SetGenerationEpoch,
    Suspend,
    Unpause,
)
from rollout.control.state import EngineState, StateMachine
from rollout.coordinator.core.context import Context, num_ahead
from rollout.coordinator.core.dispatcher import Dispatcher
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.request_table import EngineSession, Recent, Request
from rollout.coordinator.protocol.messages import (
    Disconnect,
    Heartbeat,
    Register,
    RegisterAck,
    Rollback,
    UpdateWeights,
    nack_of,
)
from rollout.errors import ConfigError, EngineStateError, RolloutError, WeightUpdateError
from rollout.weights.source import WeightsSource

logger = logging.getLogger(__name__)


class CoordinatorState(Enum):
    """State of the fleet. It changes once all engines have confirmed. STOPPING is final."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """The weights that every ready engine serves.

    checksum: "" if unknown.
    source: where a joining engine fetches the weights; None before the first commit.
    base: source of the full weights that an adapter builds on; None for the engines' initial
        weights."""

    version: int
    checksum: str
    source: WeightsSource | None
    base: WeightsSource | None = None

    @property
    def full_source(self) -> WeightsSource | None:
        """Source of the weights without their adapter."""
        if self.source is None or self.source.lora is not None:
            return self.base
        return self.source


@dataclass(slots=True)
class Fleet:
    """State, weights and settings that all engines share. Only its own methods change them.

    machine: state that all engines have confirmed. It decides which commands are legal.
    released: resources whose memory a Suspend has released.
    is_diverged: whether engines can differ from `machine` and `released`. Causes are a command that
        only some engines ran, and an engine that joined a suspended fleet.
    command_ids: ids for commands to engines, taken with next().
    weights: weights that every ready engine serves; None before the first engine or update.
    settings: the first engine's settings, which every other engine must have."""

    machine: StateMachine = field(default_factory=lambda: StateMachine(subject="all engines"))
    released: frozenset[str] = frozenset()
    is_diverged: bool = False
    command_ids: Iterator[int] = field(default_factory=count)
    weights: CommittedWeights | None = None
    settings: Mapping[str, str] | None = None

    def join(self, version: int, checksum: str, settings: Mapping[str, str]) -> CommittedWeights:
        """Return the weights that a joining engine must serve. The fleet takes its weights and
        settings from the first engine. An unknown checksum is taken from any joining engine."""
        weights = self.weights or CommittedWeights(version, checksum, None)
        self.weights = weights if weights.checksum else replace(weights, checksum=checksum)
        if self.settings is None:
            self.settings = settings
        return self.weights

    def commit(self, version: int, checksum: str, source: WeightsSource) -> None:
        """Set the weights that every engine has staged. If `source` is an adapter, the full weights
        below it are kept as `base`."""
        before = self.weights
        base = before.full_source if source.lora is not None and before is not None else None
        self.weights = CommittedWeights(version, checksum, source, base)

    def renumber(self, version: int) -> None:
        """Give the same weights a later version."""
        self.weights = replace(self.weights or CommittedWeights(0, "", None), version=version)

    @property
    def state(self) -> CoordinatorState:
        is_over = self.machine.state is EngineState.STOPPED
        return CoordinatorState.STOPPING if is_over else CoordinatorState[self.machine.state.name]

    @property
    def weights_version(self) -> int:
        return 0 if self.weights is None else self.weights.version

    @property
    def weights_checksum(self) -> str:
        """Checksum of the weights that every ready engine serves; "" if unknown."""
        return "" if self.weights is None else self.weights.checksum

    def difference(self, settings: Mapping[str, str]) -> str:
        """Return how an engine's settings differ from the first engine's, as text for an error.
        Returns "" if they are equal, or before the first engine."""
        if self.settings is None:
            return ""
        own = self.settings
        names = [name for name in {**own, **settings} if settings.get(name) != own.get(name)]
        listed = [f"{name}={settings.get(name)}, the fleet {own.get(name)}" for name in names[:3]]
        return "; ".join(listed) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")

    def diverge(self) -> None:
        """Record that engines may differ in their state or in their released memory."""
        self.is_diverged = True

    def is_done(self, command: Command[Any]) -> bool:
        """Return whether every engine is in the command's target state already. Returns False for a
        Suspend, which may release more memory, and while the fleet is diverged."""
        if self.is_diverged or isinstance(command, Suspend):
            return False
        return self.machine.state is command.transition.target

    def require_legal(self, message: ControlMessage[Any]) -> None:
        """Raise EngineStateError if the command `message` is not legal in the fleet's state."""
        if isinstance(message, UpdateWeights):
            self.machine.require_update(in_flight=message.in_flight)
            return
        if isinstance(message, Resume) and message.only is not None and self.is_diverged:
            # Engines that hold different memory would come to different states.
            why = "engines may hold different memory, resume all"
            self.machine.require(to=f"resume only={message.only!r}", why=why)
        self.machine.require_legal(message.transition)

    def change_state(self, command: Command[Any]) -> None:
        """Apply a command that every engine has run. After a partial Resume the fleet stays
        suspended until all memory is restored."""
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


@dataclass(frozen=True, slots=True)
class _Registration:
    """An engine that has registered and is not admitted yet. `left` holds the requests of the
    engine's earlier session."""

    identity: bytes
    message: Register
    left: list[Request]


class Registry:
    """Makes and ends the sessions of engines.

    engines: admitted engines by engine id.
    departed: engines that have left. The core reports them to the running commands."""

    def __init__(
        self,
        context: Context,
        dispatcher: Dispatcher,
        requests: RequestLifecycle,
        fleet: Fleet,
        *,
        num_awaited: int,
    ) -> None:
        """`num_awaited` engines must have registered before the first is admitted. The ranks of
        these engines follow the order of their ids."""
        self.context, self.dispatcher, self.fleet = context, dispatcher, fleet
        self._requests, self._num_awaited = requests, num_awaited
        self.engines: dict[bytes, EngineSession] = {}
        self.departed: list[EngineSession] = []
        self._registered: dict[bytes, _Registration] = {}
        self._unanswered: list[_Registration] = []  # registered since `probe_waiting`
        self._joining: dict[bytes, EngineSession] = {}  # admitted, not ready for work yet
        # Admitted engines that lack the fleet's weights and need another push: no copy is kept.
        self._awaiting_push: dict[bytes, EngineSession] = {}
        self._rank_of_engine: Recent[bytes, int] = Recent(context.limits.max_engines)
        self._sessions = count(1)
        self._refused: Recent[bytes, None] = Recent(context.limits.max_engines)

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has nothing to do and `departed` is empty."""
        # Engines may be joining, have left, or have received the push that they waited for.
        if self.departed or self._registered or self._joining:
            return False
        if not self._awaiting_push and not self.dispatcher.awaits_push:
            return True
        return not self._reached() and self.dispatcher.awaits_push is self._needs_push

    def ready_engines(self) -> Iterator[EngineSession]:
        """Iterate over the engines that get work, in the order in which they joined."""
        return (engine for engine in self.engines.values() if engine.is_ready)

    def members_of(self, source: WeightsSource) -> list[EngineSession]:
        """Return the engines to which a push of `source` goes. All ready engines are members.
        Engines that wait for a push are added, unless `source` builds on weights that they lack."""
        served = self.fleet.weights
        below = None if source.lora is None or served is None else served.full_source
        is_for_all = below is None and not source.builds_on
        waiting = self._awaiting_push.values() if is_for_all else ()
        return [*self.ready_engines(), *waiting]

    @property
    def num_awaiting_push(self) -> int:
        """Number of engines that lack the fleet's weights and cannot fetch a copy."""
        return len(self._awaiting_push)

    @property
    def _needs_push(self) -> bool:
        """Whether only a weight push can make an engine ready."""
        if not self._awaiting_push or self._joining or self._registered:
            return False
        return not any(self.ready_engines())

    def _reached(self) -> list[EngineSession]:
        """Return the engines that waited for a push and have received it."""
        version = self.fleet.weights_version
        return [e for e in self._awaiting_push.values() if e.weights_version == version]

    # ---- registration

    def register(self, identity: bytes, message: Register, now: float) -> None:
        """Queue an engine until `settle` admits it, or refuse it with a reason. The engine's
        earlier session ends. Its requests stay with the queued engine."""
        former = self.engines.get(message.engine_id)
        refusal = self._refusal(message)
        if refusal is not None:
            if message.engine_id not in self._refused:
                self._refused[message.engine_id] = None
                logger.warning("engine %s refused: %s", message.engine_id.hex()[:8], refusal)
            self.context.outbox.append((identity, nack_of(None, refusal)))
            if former is not None:
                self.remove(former, "it may not register again", now, sends_nack=False)
            return
        here = self.context.sessions.get(identity)
        if isinstance(here, EngineSession) and here is not former:
            self.remove(here, "another engine has its socket", now, sends_nack=False)
        earlier = self._registered.pop(message.engine_id, None)
        left = [] if earlier is None else earlier.left
        if former is not None:
            left = self._end_session(former, now)
        self._registered[message.engine_id] = _Registration(identity, message, left)
        self._unanswered.append(self._registered[message.engine_id])

    def probe_waiting(self) -> None:
        """Send a heartbeat to each engine that has registered since the last call and is not
        admitted. The heartbeat makes the engine wait longer for the RegisterAck, which a running
        command delays."""
        for each in self._unanswered:
            if self._registered.get(each.message.engine_id) is each:
                self.context.outbox.append((each.identity, Heartbeat(sequence=0)))
        self._unanswered.clear()

    def _refusal(self, message: Register) -> RolloutError | None:
        """Return why the engine cannot join, or None if it can."""
        weights, version = self.fleet.weights, message.weights_version
        own, routed = message.block_size_tokens, self.dispatcher.block_size_tokens
        if routed is not None and (own < 1 or routed % own):
            return ConfigError(
                f"the engine's blocks have {own} tokens, and prompts are routed by blocks of "
                f"{routed}: an engine may lack the block it is chosen for; start it with "
                f"block_size_tokens={routed}"
            )
        if differs := self.fleet.difference(message.settings):
            return ConfigError(
                f"the engine has {differs}: answers would depend on the engine; start it with the "
                "settings of the others"
            )
        if self.fleet.state is CoordinatorState.STOPPING:
            return EngineStateError("the fleet is stopped; no engine can join any more")
        num_others = len({*self.engines, *self._registered} - {message.engine_id})
        if num_others >= self.context.limits.max_engines:
            return RolloutError(
                f"max_engines={self.context.limits.max_engines} engines have joined already"
            )
        if weights is None:
            return None
        if version > weights.version:
            return WeightUpdateError(
                f"the engine serves version {version}, the fleet {weights.version}; versions only "
                "rise"
            )
        if message.weights_checksum in ("", weights.checksum) or not weights.checksum:
            return None
        if version == weights.version:
            return WeightUpdateError(
                f"the engine's weights of version {version} have the checksum "
                f"{message.weights_checksum!r}, the fleet's weights {weights.checksum!r}"
            )
        if weights.source is None:
            return WeightUpdateError(
                f"the engine serves version {version}, the fleet {weights.version}, which was "
                "never published; start the engine with the fleet's version"
            )
        return None

    def settle(self, now: float) -> None:
        """Admit registered engines, and give work to engines that serve the fleet's weights. No
        command may be running, because a command's engines must stay the same."""
        if len(self._registered) >= self._num_awaited:
            self._num_awaited = 1
            for engine_id in sorted(self._registered):
                self._admit(self._registered.pop(engine_id), now)
        for engine in self._reached():
            # The engine has the weights now, and registers again to get the fleet's state.
            self.remove(engine, "a push has reached it", now, suspects=(), level=logging.INFO)
        for engine in list(self._joining.values()):
            if engine.expected != (self.fleet.state.name, self.fleet.weights_version):
                # A RegisterAck cannot be corrected: the next registration gets the right one.
                reason = "the fleet's state or weights changed before it had joined"
                self.remove(engine, reason, now, suspects=(), level=logging.INFO)
            elif engine.weights_version == self.fleet.weights_version:
                del self._joining[engine.engine_id]
                self.dispatcher.begin_work(engine, now)
        self.dispatcher.await_push(self._needs_push, now)

    def _admit(self, registration: _Registration, now: float) -> None:
        message, context, fleet = registration.message, self.context, self.fleet
        refusal = self._refusal(message)  # the fleet's weights may have changed
        if refusal is not None:
            context.outbox.append((registration.identity, nack_of(None, refusal)))
            self._requests.requeue(registration.left, now)
            return
        weights = fleet.join(message.weights_version, message.weights_checksum, message.settings)
        engine = EngineSession(
            engine_id=message.engine_id,
            identity=registration.identity,
            rank=self._assign_rank(message.engine_id),
            weights_version=message.weights_version,
            max_held=message.max_requests + num_ahead(message.max_requests),
            last_seen=now,
            progress_at=now,
            session=next(self._sessions),
            expected=(fleet.state.name, weights.version),
        )
        self.engines[engine.engine_id] = context.sessions[engine.identity] = engine
        awaits_push = self._awaits_push(engine, weights)
        if not awaits_push:  # otherwise other engines continue its requests
            self.dispatcher.reclaim(engine, message.running)
        if fleet.state is CoordinatorState.SUSPENDED:
            # A new engine releases its KV cache; a suspended one may have missed a RESUME.
            was_suspended = message.state == EngineState.SUSPENDED.name
            if was_suspended or "kv_cache" not in fleet.released:
                fleet.diverge()
        self._instruct(engine, weights, message.prepared_command_id)
        if awaits_push:
            self._awaiting_push[engine.engine_id] = engine
            logger.warning(
                "%s waits for the next push: version %d was broadcast, and no copy is kept",
                *(engine, weights.version),
            )
        else:
            self._joining[engine.engine_id] = engine
        context.timers.set(("engine", engine.engine_id), now)
        if ("probe", 0) not in context.timers:
            context.timers.set(("probe", 0), now + context.limits.probe_interval_s)
        context.counters.num_engines_joined += 1
        logger.info("%s joined with %d requests", engine, len(engine.requests))
        self._requests.requeue(registration.left, now)

    def _assign_rank(self, engine_id: bytes) -> int:
        """Return the engine's earlier rank if it is free, or the lowest free rank."""
        taken = {engine.rank for engine in self.engines.values()}
        rank = self._rank_of_engine.pop(engine_id, -1)
        if rank < 0 or rank in taken:
            rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        self._rank_of_engine[engine_id] = rank
        return rank

    def _instruct(
        self, engine: EngineSession, weights: CommittedWeights, prepared_command_id: int | None
    ) -> None:
        """Send the RegisterAck, and the commands that bring the engine to the fleet's state."""
        state, limits = self.fleet.state, self.context.limits
        awaits_push = self._awaits_push(engine, weights)
        is_behind = engine.weights_version < weights.version and not awaits_push
        # The same weights under a later version, which an engine accepts only while paused.
        is_renumbered = is_behind and weights.source is None
        is_running = state is CoordinatorState.RUNNING
        must_pause = awaits_push or (is_renumbered and is_running)
        ack = RegisterAck(
            coordinator_id=self.context.coordinator_id,
            state=EngineState.PAUSED.name if must_pause else state.name,
            lease_s=limits.engine_lease_s,
            heartbeat_s=limits.heartbeat_s,
            report_interval_tokens=limits.report_interval_tokens,
            weights_version=weights.version,
            weights=weights.source if is_behind else None,
            base_weights=weights.base if is_behind else None,
            keep=tuple(request.current_attempt() for request in engine.requests.values()),
            session=engine.session,
        )
        self.context.send(engine, ack)
        if prepared_command_id is not None and ack.weights is None:
            # A committed update would have a source, whose weights replace the staged ones.
            self.context.send(engine, Rollback(command_id=prepared_command_id))
        if is_renumbered:
            command_ids = self.fleet.command_ids
            epoch = SetGenerationEpoch(command_id=next(command_ids), version=weights.version)
            self.context.send(engine, epoch)
            if is_running:
                self.context.send(engine, Unpause(command_id=next(command_ids)))

    @staticmethod
    def _awaits_push(engine: EngineSession, weights: CommittedWeights) -> bool:
        """Return whether the engine lacks `weights` and no copy of them is kept."""
        sources = (weights.source, weights.base)
        is_gone = any(source is not None and not source.is_kept for source in sources)
        return is_gone and engine.weights_version < weights.version

    # ---- heartbeats and deadlines

    def heartbeat(self, engine: EngineSession, message: Heartbeat, now: float) -> None:
        """Keep the engine's status, and answer with the same sequence number."""
        status = message.status
        if status is not None:
            engine.report(status, now)
        self.context.send(engine, Heartbeat(sequence=message.sequence))

    def check(self, engine_id: bytes, now: float) -> None:
        """Remove an engine whose lease or progress deadline has passed. Otherwise set the timer of
        the next check."""
        engine, limits = self.engines[engine_id], self.context.limits
        lease_end = engine.last_seen + limits.engine_lease_s
        step_deadline_s = limits.step_deadline_s(engine.longest_step_s)
        progress_end = engine.progress_at + step_deadline_s
        if engine.num_awaited or not engine.is_ready:
            progress_end = now + step_deadline_s
        if now >= lease_end:
            self.remove(engine, f"silent for {now - engine.last_seen:.1f} s", now)
        elif now >= progress_end:
            self.remove(engine, f"no step for {now - engine.progress_at:.1f} s", now)
        else:
            self.context.timers.set(("engine", engine_id), min(lease_end, progress_end))

    def probe(self, _: int, now: float) -> None:
        """Send each engine a heartbeat with sequence number 0."""
        # Sending fails if the engine's process has ended, which shows before its lease ends.
        heartbeat = Heartbeat(sequence=0)
        for engine in self.engines.values():
            self.context.send(engine, heartbeat)
        if self.engines:
            self.context.timers.set(("probe", 0), now + self.context.limits.probe_interval_s)

    def send_queued(self) -> None:
        """Send each engine its queued acknowledgements and aborts."""
        for engine in self.engines.values():
            for message in engine.take_queued():
                self.context.send(engine, message)

    # ---- removal

    def disconnect(self, engine: EngineSession, message: Disconnect, now: float) -> None:
        """Remove an engine that disconnects. An engine that failed names the attempts of its last
        step, which become the suspects."""
        named = {(attempt.request_id, attempt.attempt) for attempt in message.suspects}
        held = engine.requests.values()
        suspects = [r for r in held if (r.server_id, r.attempt) in named]
        reason, is_fault = f"it disconnected: {message.reason}", message.is_fault
        level = logging.WARNING if is_fault else logging.INFO
        suspects = suspects if is_fault else []
        self.remove(engine, reason, now, suspects=suspects, sends_nack=False, level=level)

    def remove(
        self,
        engine: EngineSession,
        reason: str,
        now: float,
        *,
        suspects: Sequence[Request] | None = None,
        sends_nack: bool = True,
        level: int = logging.WARNING,
    ) -> None:
        """Remove an engine, and queue its requests for other engines.

        `RequestLifecycle.requeue` fails aborted requests and requests with too many failed engines.

        suspects: requests that may have made the engine fail; None for all that it may have been
            running.
        sends_nack: send the engine a Nack, after which it can register again.
        level: level of the log line."""
        logger.log(level, "%s left: %s", engine, reason)
        if suspects is None:
            suspects = self.dispatcher.suspects(engine)
        self.context.counters.num_engines_lost += 1
        if sends_nack:
            refusal = nack_of(None, RolloutError(f"{reason}; register again"))
            self.context.send(engine, refusal)
        for request in suspects:
            request.lost_attempts |= {request.attempt}
        self._requests.requeue(self._end_session(engine, now), now)

    def _end_session(self, engine: EngineSession, now: float) -> list[Request]:
        """End the session of an engine, and return the requests that it had."""
        del self.engines[engine.engine_id]
        if self.context.sessions.get(engine.identity) is engine:
            del self.context.sessions[engine.identity]
        self._joining.pop(engine.engine_id, None)
        self._awaiting_push.pop(engine.engine_id, None)
        self.context.timers.discard(("engine", engine.engine_id))
        self.departed.append(engine)
        return self.dispatcher.end_work(engine, now)
