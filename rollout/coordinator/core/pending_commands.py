"""PendingCommands: what clients command, one after the other, each answered once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.coordinator.core.fleet import (
    EPOCH_COMMANDS,
    CoordinatorState,
    is_done,
    name_of,
    require_legal,
    require_readable,
)
from rollout.coordinator.core.operations import (
    EpochChange,
    Operation,
    Shutdown,
    StateChange,
)
from rollout.coordinator.core.registry import Registry
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.sessions import ClientSession, EngineSession
from rollout.coordinator.core.weight_commit import WeightCommit
from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import (
    Ack,
    Command,
    Nack,
    UpdateWeights,
    WireError,
    nack_of,
)
from rollout.errors import EngineStateError, RequestAbortedError, RolloutError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pending:
    """A command that waits, or runs if it has an operation."""

    number: int
    client: ClientSession
    message: Command | UpdateWeights
    deadline_at: float
    operation: Operation | None = None

    @property
    def is_question(self) -> bool:
        """Whether it changes nothing, and so waits for no other command."""
        return isinstance(self.message, Command) and self.message.header is Headers.STATS


class PendingCommands:
    """One command runs at a time, the others wait in order; questions run beside it. `is_over`
    after a SHUTDOWN."""

    def __init__(self, registry: Registry, requests: RequestLifecycle) -> None:
        self._registry, self._context, self._requests = registry, registry.context, requests
        self._queue: deque[_Pending] = deque()
        self._running: dict[int, _Pending] = {}  # by the command id that engines know
        self._num_submitted = 0
        self.is_over = False

    @property
    def is_busy(self) -> bool:
        """Whether a command runs that changes something."""
        return any(not pending.is_question for pending in self._running.values())

    @property
    def has_any(self) -> bool:
        """Whether a command runs or waits."""
        return bool(self._running or self._queue)

    # ---- what comes

    def submit(self, client: ClientSession, message: Command | UpdateWeights, now: float) -> None:
        """Queue a command; of a repeated one, only the answer is sent again if there is one."""
        limits, counters = self._context.limits, self._context.counters
        if message.command_id in client.answers:
            answer = client.answers[message.command_id]
            counters.num_duplicates += 1
            if answer is not None:
                self._context.send(client, answer)
            return
        num_pending = len(self._queue) + len(self._running)
        if num_pending > limits.max_queued_commands:
            counters.num_commands_refused += 1
            error = EngineStateError(f"{num_pending} commands wait already; try again later")
            self._context.send(client, nack_of(message.command_id, error))
            return
        counters.num_commands += 1
        client.answers[message.command_id] = None
        deadline_s = limits.command_deadline_s
        if message.deadline_s is not None:
            deadline_s = message.deadline_s
        self._num_submitted += 1
        pending = _Pending(self._num_submitted, client, message, now + deadline_s)
        self._context.timers.set(("command", pending.number), pending.deadline_at)
        if pending.is_question and not self.is_over:
            self._begin(pending, now)
        else:
            self._queue.append(pending)

    def answered(self, engine: EngineSession, answer: Ack | Nack, now: float) -> None:
        """An engine's answer; one that nobody waits for any more is counted and dropped."""
        pending = None if answer.command_id is None else self._running.get(answer.command_id)
        operation = None if pending is None else pending.operation
        if (
            pending is None
            or operation is None
            or operation.waiting.get(engine.engine_id) is not engine
        ):
            self._context.counters.num_unexpected += 1
            return
        operation.answered(engine, answer, now)
        self._go_on(pending)

    def engine_left(self, engine: EngineSession, now: float) -> None:
        """Running commands wait for it no more."""
        for pending in list(self._running.values()):
            assert pending.operation is not None
            pending.operation.lost(engine, now)
            self._go_on(pending)

    def deadline_passed(self, number: int, now: float) -> None:
        """Of a command that runs or still waits its turn."""
        for pending in [*self._running.values(), *self._queue]:
            if pending.number != number:
                continue
            if pending.operation is not None:
                pending.operation.timed_out(now)
                self._go_on(pending)
            else:
                self._queue.remove(pending)
                self._answer(pending, _not_begun(pending))

    def advance(self, now: float) -> bool:
        """Begin the next command if none runs; returns whether there was one."""
        if self.is_busy or not self._queue or self.is_over:
            return False
        pending = self._queue.popleft()
        if now >= pending.deadline_at:
            # It passed together with that of the one before, which was looked at first.
            self._answer(pending, _not_begun(pending))
        else:
            self._begin(pending, now)
        return True

    def shorten_answer(self, client: ClientSession, command_id: int) -> None:
        """An answer cannot be sent: the client hears that it is done, and no more."""
        client.answers[command_id] = Ack(command_id=command_id)
        self._context.send(client, Ack(command_id=command_id))

    def close(self, reason: str) -> None:
        """Refuse whatever runs or waits."""
        error = WireError.of(RequestAbortedError(reason))
        for pending in [*self._running.values(), *self._queue]:
            self._answer(pending, error)
        self._running.clear()
        self._queue.clear()

    # ---- what becomes of it

    def _begin(self, pending: _Pending, now: float) -> None:
        try:
            operation = pending.operation = self._operation(pending)
        except RolloutError as error:
            self._answer(pending, WireError.of(error))
            return
        self._running[operation.command_id] = pending
        if operation.outcome is None:
            operation.begin(now)
        self._go_on(pending)

    def _operation(self, pending: _Pending) -> Operation:
        """Raises RolloutError if it cannot be done at all."""
        registry, message, deadline_at = self._registry, pending.message, pending.deadline_at
        require_legal(registry.fleet, message)
        if isinstance(message, UpdateWeights):
            return WeightCommit(registry, message, deadline_at)
        require_readable(message)
        if message.header is Headers.SHUTDOWN:
            return Shutdown(registry, message, deadline_at)
        if message.header is Headers.STATS:
            return Operation(registry, message, deadline_at)
        if message.header in EPOCH_COMMANDS:
            return EpochChange(registry, message, deadline_at)
        operation = StateChange(registry, message, deadline_at)
        if is_done(registry.fleet, message.header):
            operation.end()
        return operation

    def _go_on(self, pending: _Pending) -> None:
        """Answer a running command if it has ended; its deadline may have moved if not."""
        operation = pending.operation
        assert operation is not None
        if operation.outcome is None:
            self._context.timers.set(("command", pending.number), operation.deadline_at)
            return
        if self._running.pop(operation.command_id, None) is None:
            return
        self._answer(pending, operation.outcome)
        if isinstance(operation, Shutdown):
            self.is_over = True
        elif self._registry.fleet.state is CoordinatorState.STOPPING:
            error = RequestAbortedError("the engines were stopped before the request had ended")
            self._requests.fail_all(WireError.of(error))

    def _answer(self, pending: _Pending, outcome: Mapping[str, Any] | WireError) -> None:
        self._context.timers.discard(("command", pending.number))
        command_id, client = pending.message.command_id, pending.client
        answer: Ack | Nack
        if isinstance(outcome, WireError):
            self._context.counters.num_commands_refused += 1
            answer = Nack(command_id=command_id, error=outcome)
            logger.info("%s of %s: %s", name_of(pending.message), client, outcome.message)
        else:
            answer = Ack(command_id=command_id, result=outcome)
        client.answers[command_id] = answer
        # Answers of commands that wait or run are not old.
        num_over = len(client.answers) - self._context.limits.max_answers
        for old_id in list(client.answers)[: max(num_over, 0)]:
            if client.answers[old_id] is not None:
                del client.answers[old_id]
        if not client.has_left:
            self._context.send(client, answer)


def _not_begun(pending: _Pending) -> WireError:
    """The outcome where the deadline passed while others ran."""
    return WireError.of(
        EngineStateError(f"{name_of(pending.message)}: not begun in time, others ran before it")
    )
