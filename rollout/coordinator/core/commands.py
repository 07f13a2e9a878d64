"""CommandQueue: runs the commands of all clients one after the other, and answers each once.

Used by `rollout.coordinator.core.core`. An Operation is one command, from the messages to engines
to its outcome. Operations change the Fleet once engines have confirmed, set timers, and append
messages to the outbox of the Context.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import structs

from rollout.config import KVCacheManagementMode
from rollout.control.commands import (
    ChecksumWeights,
    Command,
    ControlMessage,
    IncrementStaleness,
    SetGenerationEpoch,
    Shutdown,
    Stats,
    Suspend,
)
from rollout.coordinator.core.fleet import CoordinatorState, Registry
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.request_table import ClientSession, EngineSession
from rollout.coordinator.protocol.messages import (
    Ack,
    Commit,
    Nack,
    Prepare,
    Rollback,
    UpdateWeights,
    WireError,
    nack_of,
)
from rollout.errors import (
    EngineStateError,
    InvalidRequestError,
    ProtocolError,
    RequestAbortedError,
    RolloutError,
    WeightUpdateError,
)
from rollout.weights.version import next_version
from rollout.wire import Message

logger = logging.getLogger(__name__)

_RECOMPUTE = KVCacheManagementMode.RECOMPUTE.value  # the mode that keeps no cached block


class Operation:
    """One command of a client, sent to engines.

    outcome: None while the command runs, then its result or the error for the client.
    members: engines to which the command was sent and that have not left, by engine id.
    waiting: members that have not answered, by engine id.
    lost_ranks: ranks of engines that left before the command ended.
    command_id: id of the command in messages to engines.
    deadline_at: time on the core's clock, in seconds.
    holds_engines: whether the command can keep an engine from stepping."""

    holds_engines = True

    def __init__(
        self,
        registry: Registry,
        client: ClientSession,
        message: ControlMessage[Any],
        deadline_at: float,
    ) -> None:
        self.registry, self.context, self.fleet = registry, registry.context, registry.fleet
        self.client, self.message, self.deadline_at = client, message, deadline_at
        self.name = message.name
        self.command_id = next(self.fleet.command_ids)
        self.outcome: Mapping[str, Any] | WireError | None = None
        self.members: dict[bytes, EngineSession] = {}
        self.waiting: dict[bytes, EngineSession] = {}
        self.lost_ranks: list[int] = []
        self.results: dict[int, Mapping[str, Any] | None] = {}  # by rank; None without a report
        self.refusals: dict[int, WireError] = {}  # by rank, in the order of arrival

    def begin(self, now: float) -> None:
        """Send the command to the ready engines. Raises RolloutError if the command cannot run.
        Subclasses send other messages."""
        seconds_left = self.deadline_at - now
        own = structs.replace(self.message, command_id=self.command_id, deadline_s=seconds_left)
        self.ask(self.registry.ready_engines(), own, now)

    def complete(self, now: float) -> None:
        """End the command after the last answer of its members. The outcome is the first refusal.
        If no engine refused, the outcome has the fleet's state and weights, and the engines'
        results by rank."""
        # Ranks are strings, as keys of a message's map must be.
        self.outcome = next(iter(self.refusals.values()), None) or {
            "state": self.fleet.state.name,
            "weights_version": self.fleet.weights_version,
            "weights_checksum": self.fleet.weights_checksum,
            "ranks": {str(rank): result for rank, result in sorted(self.results.items())},
            "lost_ranks": self.lost_ranks,
        }

    def timed_out(self, now: float) -> None:
        """Fail the command, because its deadline has passed before the last answer."""
        self.end_unanswered(now, "give the command again")

    def answered(self, engine: EngineSession, answer: Ack | Nack, now: float) -> None:
        """Keep the answer of a member. The last answer completes the command."""
        self.stop_waiting(engine, now)
        if isinstance(answer, Ack):
            self.results[engine.rank] = answer.result
        else:
            why = answer.error.message or answer.error.type_name
            error = structs.replace(answer.error, message=f"rank {engine.rank}: {why}")
            self.refusals[engine.rank] = error
        if not self.waiting:
            self.complete(now)

    def lost(self, engine: EngineSession, now: float) -> None:
        """Remove an engine from the members after it has left the fleet. Completes the command if
        this engine's answer was the last one missing."""
        if self.members.get(engine.engine_id) is not engine:
            return
        del self.members[engine.engine_id]
        self.lost_ranks.append(engine.rank)
        if self.waiting.pop(engine.engine_id, None) is not None and not self.waiting:
            self.complete(now)

    def ask(self, engines: Iterable[EngineSession], message: Message, now: float) -> None:
        """Make `engines` the members, and send `message` to each of them. Completes the command at
        once if `engines` is empty."""
        self.members = {engine.engine_id: engine for engine in engines}
        self.waiting = dict(self.members)
        for engine in self.members.values():
            if self.holds_engines:
                engine.begin_command()
            self.context.send(engine, message)
        if not self.waiting:
            self.complete(now)

    def stop_waiting(self, engine: EngineSession, now: float) -> None:
        del self.waiting[engine.engine_id]
        if self.holds_engines:
            engine.end_command(now)

    def stop_waiting_for_all(self, now: float) -> list[EngineSession]:
        """Stop waiting for all members. Returns the members that have not answered."""
        silent = list(self.waiting.values())
        for engine in silent:
            self.stop_waiting(engine, now)
        return silent

    def end_unanswered(self, now: float, ending: str) -> None:
        """Fail the command with an error that names the ranks without an answer. `ending` is the
        last part of the error message."""
        silent = self.stop_waiting_for_all(now)
        ranks = ", ".join(str(engine.rank) for engine in silent)
        error = EngineStateError(f"{self.name}: no answer in time from rank {ranks}; {ending}")
        self.outcome = WireError.of(error)


class StatsOperation(Operation):
    """A Stats command. It runs beside other commands, and keeps no engine from stepping."""

    holds_engines = False

    def complete(self, now: float) -> None:
        """Add the numbers of waiting requests, refused connections and unknown peers to the
        outcome."""
        super().complete(now)
        if isinstance(self.outcome, Mapping):
            num_unknown = self.context.counters.num_unknown_peers
            refused = {**self.context.refused(), "num_unknown_peers": num_unknown}
            num_queued = self.registry.dispatcher.num_waiting
            self.outcome = {**self.outcome, "num_queued": num_queued, "refused": refused}


class ShutdownOperation(Operation):
    """A Shutdown command. The fleet ends whatever the engines answer."""

    def ask(self, engines: Iterable[EngineSession], message: Message, now: float) -> None:
        """Send `message` to all engines, including engines that are not ready."""
        # An engine that is not ready would otherwise wait for the coordinator for ever.
        super().ask(self.registry.engines.values(), message, now)

    def timed_out(self, now: float) -> None:
        self.end_unanswered(now, "the coordinator ends nevertheless")


class StateChange(Operation):
    """A Pause, Unpause, Suspend, Resume or Stop. The fleet's state changes once all engines
    confirm.

    If only some engines confirm, the state stays and the fleet is marked as diverged. The client
    can then repeat the command or send the reverse command. An engine that is already in the
    command's target state confirms at once."""

    message: Command[Any]

    def begin(self, now: float) -> None:
        if self.fleet.is_done(self.message):
            super().complete(now)
        else:
            super().begin(now)

    def complete(self, now: float) -> None:
        if self.refusals:
            if self.results:
                self.fleet.diverge()
        else:
            before = self.fleet.state
            self.fleet.change_state(self.message)
            logger.info("%s -> %s", before.name, self.fleet.state.name)
            if isinstance(self.message, Suspend) and "kv_cache" in self.fleet.released:
                self.registry.dispatcher.caches_dropped(
                    engine
                    for engine in self.members.values()
                    if (self.results.get(engine.rank) or {}).get("mode") == _RECOMPUTE
                )
        super().complete(now)

    def timed_out(self, now: float) -> None:
        self.fleet.diverge()
        self.end_unanswered(now, f"the fleet stays {self.fleet.state.name}")


class EpochChange(Operation):
    """A SetGenerationEpoch or IncrementStaleness: gives the same weights a later version. The
    version is set unless all engines refuse. An engine that does not confirm is removed. It gets
    the version when it registers again."""

    message: SetGenerationEpoch | IncrementStaleness

    def begin(self, now: float) -> None:
        version = self.fleet.weights_version + 1
        if isinstance(self.message, SetGenerationEpoch):
            version = self.message.version
        self._version = next_version(self.fleet.weights_version, version, InvalidRequestError)
        own = SetGenerationEpoch(
            command_id=self.command_id,
            deadline_s=self.deadline_at - now,
            version=self._version,
        )
        self.ask(self.registry.ready_engines(), own, now)

    def complete(self, now: float) -> None:
        if not self.refusals or self.results or self.lost_ranks:
            self._set_version(now)
        super().complete(now)

    def timed_out(self, now: float) -> None:
        self.end_unanswered(now, f"it was removed; the version is {self._version}")
        self._set_version(now)

    def _set_version(self, now: float) -> None:
        self.fleet.renumber(self._version)
        for engine in list(self.members.values()):
            if engine.rank in self.results:
                engine.serve(self._version)
            else:
                reason = f"{self.name} was not confirmed"
                self.registry.remove(engine, reason, now, suspects=())
        self.registry.dispatcher.caches_dropped(self.members.values())


class WeightCommit(Operation):
    """One weight update over all engines: a two-phase commit with presumed abort.

    Before every member has voted yes, any fault leaves all engines at the serving version. After
    the last vote the update is committed. A member that does not confirm the commit is removed. It
    fetches the weights when it registers again."""

    message: UpdateWeights
    _is_decided = False
    _decided_at = _grace_end = 0.0  # times of a decided commit

    def begin(self, now: float) -> None:
        version = self.message.version
        if version is None:
            version = self.fleet.weights_version + 1
        self._version = next_version(self.fleet.weights_version, version, WeightUpdateError)
        engines = self.registry.members_of(self.message.source)
        self.registry.dispatcher.await_push(False, now)  # the awaited push has come
        prepare = Prepare(
            command_id=self.command_id,
            version=self._version,
            source=structs.replace(self.message.source, num_members=len(engines)),
            in_flight=self.message.in_flight,
            deadline_s=self.deadline_at - now,
        )
        self.ask(engines, prepare, now)

    def answered(self, engine: EngineSession, answer: Ack | Nack, now: float) -> None:
        if isinstance(answer, Nack) and self._is_decided:
            # The core then calls `lost`, which stops waiting for the engine.
            reason = f"it did not commit version {self._version}: {answer.error.message}"
            self.registry.remove(engine, reason, now, suspects=())
            return
        if self._is_decided:
            engine.serve(self._version)
        super().answered(engine, answer, now)
        if isinstance(answer, Nack) and self.outcome is None:
            self._roll_back(self.refusals[engine.rank], now)

    def lost(self, engine: EngineSession, now: float) -> None:
        if not self._is_decided and self.waiting.get(engine.engine_id) is engine:
            del self.members[engine.engine_id]
            self._refuse(f"rank {engine.rank} was lost before its vote", now, is_transient=True)
        else:
            super().lost(engine, now)

    def complete(self, now: float) -> None:
        if self._is_decided:
            self.registry.dispatcher.caches_dropped(self.members.values())
            super().complete(now)
        elif self.refusals:
            self._roll_back(next(iter(self.refusals.values())), now)
        elif not self.members:
            # Without a vote it is unknown whether engines can load these weights.
            num_others = self.registry.num_awaiting_push
            if num_others and self.message.source.lora is not None:
                reason = f"all {num_others} engines lack the full weights of this adapter"
                self._refuse(reason, now, "push the full weights first")
                return
            reason = f"no engine is ready to verify version {self._version}"
            self._refuse(reason, now, "push again when one has joined", is_transient=True)
        else:
            checksum, fault = self._agreed_checksum()
            if fault:
                self._refuse(fault, now)
            else:
                self._commit(checksum, now)

    def timed_out(self, now: float) -> None:
        if not self._is_decided:
            ranks = ", ".join(str(engine.rank) for engine in self.waiting.values())
            self._refuse(f"no vote in time from rank {ranks}", now)
            return
        # An engine with work commits between two steps, and confirms after the second.
        ends = {}
        for engine_id, engine in self.waiting.items():
            step_s = self.context.limits.step_deadline_s(engine.longest_step_s)
            latest = max(self._grace_end, self._decided_at + 2 * step_s)  # whatever it reports
            end = min(engine.progress_at + step_s, latest)
            ends[engine_id] = end if engine.is_stepping else now
        for engine in list(self.waiting.values()):
            if now >= ends[engine.engine_id]:
                # The core then calls `lost`, which stops waiting for the engine.
                reason = f"it did not commit version {self._version} in time"
                self.registry.remove(engine, reason, now, suspects=())
        self.deadline_at = min((end for end in ends.values() if end > now), default=now)

    def _agreed_checksum(self) -> tuple[str, str]:
        """Return (checksum, ""), or ("", fault) if the source and the members name different
        checksums. The checksum is "" if neither the source nor a member names one."""
        named: dict[str, str] = {}
        if self.message.source.checksum:
            named[self.message.source.checksum] = "the source"
        for rank, vote in sorted(self.results.items()):
            checksum = (vote or {}).get("checksum") or ""
            if not isinstance(checksum, str):
                return "", f"rank {rank} names the checksum {checksum!r:.100}, which is not text"
            if checksum:
                named.setdefault(checksum, f"rank {rank}")
        if len(named) > 1:
            listed = ", ".join(f"{checksum!r} by {who}" for checksum, who in named.items())
            return "", f"the staged weights have different checksums: {listed}"
        return next(iter(named), ""), ""

    def _commit(self, checksum: str, now: float) -> None:
        self._is_decided = True
        self.results = {}
        # An engine that joins later must fetch the same weights.
        source = structs.replace(self.message.source, checksum=checksum, num_members=0)
        self.fleet.commit(self._version, checksum, source)
        self.context.counters.num_weight_commits += 1
        logger.info("version %d is committed on %d engines", self._version, len(self.members))
        limits = self.context.limits
        self.deadline_at = max(self.deadline_at, now + limits.commit_grace_s)
        self._decided_at, self._grace_end = now, self.deadline_at
        commit = Commit(command_id=self.command_id, version=self._version)
        self.ask(list(self.members.values()), commit, now)

    def _refuse(
        self, reason: str, now: float, remedy: str = "", *, is_transient: bool = False
    ) -> None:
        """Roll back with an error made of `reason` and `remedy`. `is_transient` means that the same
        update may succeed later."""
        kept = "the serving weights are kept" + (f": {remedy}" if remedy else "")
        error = WeightUpdateError(f"{reason}; {kept}")
        error.is_transient = is_transient
        self._roll_back(WireError.of(error), now)

    def _roll_back(self, error: WireError, now: float) -> None:
        """Drop the update on all engines, and end with `error`. Does not wait for the engines'
        answers."""
        self.stop_waiting_for_all(now)
        self.context.counters.num_weight_rollbacks += 1
        logger.warning("version %d is rolled back: %s", self._version, error.message)
        rollback = Rollback(command_id=self.command_id)
        for engine in self.members.values():
            self.context.send(engine, rollback)
        self.outcome = error


def operation_of(
    registry: Registry, client: ClientSession, message: ControlMessage[Any], deadline_at: float
) -> Operation:
    """Return the operation that runs the command `message` of `client`."""
    arguments = registry, client, message, deadline_at
    match message:
        case UpdateWeights():
            return WeightCommit(*arguments)
        case SetGenerationEpoch() | IncrementStaleness():
            return EpochChange(*arguments)
        case Stats():
            return StatsOperation(*arguments)
        case Shutdown():
            return ShutdownOperation(*arguments)
        case ChecksumWeights():  # no commit runs meanwhile: the engines can be compared
            return Operation(*arguments)
        case _:
            return StateChange(*arguments)


class CommandQueue:
    """Runs one command at a time, and Stats commands beside it. Other commands wait in order.
    `is_over` tells whether a Shutdown has run."""

    def __init__(self, registry: Registry, requests: RequestLifecycle) -> None:
        self._registry, self._context, self._requests = registry, registry.context, requests
        self._queue: deque[Operation] = deque()
        self._running: dict[int, Operation] = {}  # by command id
        self.is_over = False

    @property
    def is_busy(self) -> bool:
        """Whether a command other than Stats runs."""
        return bool({*map(type, self._running.values())} - {StatsOperation})

    @property
    def has_any(self) -> bool:
        """Whether a command runs or waits."""
        return bool(self._running or self._queue)

    # ---- input

    def submit(self, client: ClientSession, message: ControlMessage[Any], now: float) -> None:
        """Queue a command, or begin it at once if it is a Stats command. A repeated command is not
        run again, and gets its answer again if it has been answered. A command is refused if more
        than `max_queued_commands` wait or run."""
        limits, counters = self._context.limits, self._context.counters
        if message.command_id in client.answers:
            answer = client.answers[message.command_id]
            counters.num_duplicates += 1
            if answer is not None:
                self._context.send(client, answer)
            return
        num_pending = len(self._queue) + len(self._running)
        if num_pending > limits.max_queued_commands:
            error = EngineStateError(
                f"{num_pending} commands wait already, max_queued_commands="
                f"{limits.max_queued_commands}; try again later"
            )
            self.refuse(client, nack_of(message.command_id, error))
            return
        counters.num_commands += 1
        client.begin_command(message.command_id)
        deadline_s = message.deadline_s
        if deadline_s is None:
            deadline_s = limits.command_deadline_s
        operation = operation_of(self._registry, client, message, now + deadline_s)
        self._context.timers.set(("command", operation.command_id), operation.deadline_at)
        if isinstance(operation, StatsOperation) and not self.is_over:
            self._begin(operation, now)
        else:
            self._queue.append(operation)

    def refuse(self, client: ClientSession, refusal: Nack) -> None:
        """Send the refusal of a command that was not accepted. Sends nothing if the command id is
        known."""
        if refusal.command_id not in client.answers:
            self._context.counters.num_commands_refused += 1
            self._context.send(client, refusal)

    def answered(self, engine: EngineSession, answer: Ack | Nack, now: float) -> None:
        """Pass an engine's answer to the command that waits for it. An answer that no command waits
        for is counted and dropped."""
        operation = None if answer.command_id is None else self._running.get(answer.command_id)
        if operation is None or operation.waiting.get(engine.engine_id) is not engine:
            self._context.counters.num_unexpected += 1
            return
        operation.answered(engine, answer, now)
        self._answer_if_ended(operation)

    def engine_left(self, engine: EngineSession, now: float) -> None:
        """Report to the running commands that an engine has left."""
        for operation in list(self._running.values()):
            operation.lost(engine, now)
            self._answer_if_ended(operation)

    def deadline_passed(self, command_id: int, now: float) -> None:
        """Fail a running or waiting command whose deadline has passed."""
        if (operation := self._running.get(command_id)) is not None:
            operation.timed_out(now)
            self._answer_if_ended(operation)
            return
        (operation,) = [waits for waits in self._queue if waits.command_id == command_id]
        self._queue.remove(operation)
        self._answer(operation, _not_begun(operation))

    def advance(self, now: float) -> bool:
        """Begin the next command if none runs. Returns whether a command left the queue."""
        if self.is_busy or not self._queue or self.is_over:
            return False
        operation = self._queue.popleft()
        if now >= operation.deadline_at:
            # Its deadline passed together with the deadline of the command before it.
            self._answer(operation, _not_begun(operation))
        else:
            self._begin(operation, now)
        return True

    def shorten_answer(self, client: ClientSession, command_id: int) -> None:
        """Send an answer without the engines' results, because no frame can carry the full
        answer."""
        answer = client.answers.get(command_id)
        if not isinstance(answer, Ack) or answer.result is None:
            return
        shorter = _without_reports(command_id, answer.result)
        client.keep_answer(command_id, shorter, self._context.limits.max_answers)
        self._context.send(client, shorter)

    def close(self, reason: str) -> None:
        """Fail all running and waiting commands with RequestAbortedError."""
        error = WireError.of(RequestAbortedError(reason))
        for operation in [*self._running.values(), *self._queue]:
            self._answer(operation, error)
        self._running.clear()
        self._queue.clear()

    # ---- running and answering

    def _begin(self, operation: Operation, now: float) -> None:
        try:
            self._registry.fleet.require_legal(operation.message)
            self._running[operation.command_id] = operation
            operation.begin(now)
        except RolloutError as error:
            self._running.pop(operation.command_id, None)
            self._answer(operation, WireError.of(error))
        else:
            self._answer_if_ended(operation)

    def _answer_if_ended(self, operation: Operation) -> None:
        """Answer a running command if it has ended. Otherwise set the timer of its deadline. Fails
        all requests if the command has stopped the fleet."""
        if operation.outcome is None:
            self._context.timers.set(("command", operation.command_id), operation.deadline_at)
            return
        if self._running.pop(operation.command_id, None) is None:
            return
        self._answer(operation, operation.outcome)
        if isinstance(operation, ShutdownOperation):
            self.is_over = True
        elif self._registry.fleet.state is CoordinatorState.STOPPING:
            error = RequestAbortedError("the engines were stopped before the request had ended")
            self._requests.fail_all(WireError.of(error))

    def _answer(self, operation: Operation, outcome: Mapping[str, Any] | WireError) -> None:
        self._context.timers.discard(("command", operation.command_id))
        command_id, client = operation.message.command_id, operation.client
        answer: Ack | Nack
        if isinstance(outcome, WireError):
            self._context.counters.num_commands_refused += 1
            answer = Nack(command_id=command_id, error=outcome)
            logger.info("%s of %s: %s", operation.name, client, outcome.message)
        else:
            try:
                answer = Ack(command_id=command_id, result=outcome)
            except ProtocolError as fault:
                logger.warning("%s of %s: %s", operation.name, client, fault)
                answer = _without_reports(command_id, outcome)
        client.keep_answer(command_id, answer, self._context.limits.max_answers)
        if not client.has_left:
            self._context.send(client, answer)


def _without_reports(command_id: int, outcome: Mapping[str, Any]) -> Ack:
    return Ack(command_id=command_id, result={**outcome, "ranks": {}})


def _not_begun(operation: Operation) -> WireError:
    return WireError.of(
        EngineStateError(f"{operation.name}: not begun in time, other commands ran before it")
    )
