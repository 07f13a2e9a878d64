"""PendingCommands: the commands of all clients, run one after the other, each answered once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from rollout.control.commands import ControlMessage
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.coordinator.core.operations import (
    Operation,
    ShutdownOperation,
    StatsOperation,
    operation_of,
)
from rollout.coordinator.core.registry import Registry
from rollout.coordinator.core.request_lifecycle import RequestLifecycle
from rollout.coordinator.core.request_table import ClientSession, EngineSession
from rollout.coordinator.protocol.messages import (
    Ack,
    Nack,
    WireError,
    nack_of,
)
from rollout.errors import EngineStateError, ProtocolError, RequestAbortedError, RolloutError

logger = logging.getLogger(__name__)


class PendingCommands:
    """One command runs at a time, and the others wait in order; Stats run beside it. is_over:
    whether a Shutdown has been done."""

    def __init__(self, registry: Registry, requests: RequestLifecycle) -> None:
        self._registry, self._context, self._requests = registry, registry.context, requests
        self._queue: deque[Operation] = deque()
        self._running: dict[int, Operation] = {}  # by command id
        self.is_over = False

    @property
    def is_busy(self) -> bool:
        """Whether a command runs that others must wait for."""
        return any(type(operation) is not StatsOperation for operation in self._running.values())

    @property
    def has_any(self) -> bool:
        """Whether a command runs or waits."""
        return bool(self._running or self._queue)

    # ---- input

    def submit(self, client: ClientSession, message: ControlMessage[Any], now: float) -> None:
        """Queue a command. If it is a repeated one, its answer is sent again, if there is one."""
        limits, counters = self._context.limits, self._context.counters
        if message.command_id in client.answers:
            answer = client.answers[message.command_id]
            counters.num_duplicates += 1
            if answer is not None:
                self._context.send(client, answer)
            return
        num_pending = len(self._queue) + len(self._running)
        if num_pending > limits.max_queued_commands:
            error = EngineStateError(f"{num_pending} commands wait already; try again later")
            self.refuse(client, nack_of(message.command_id, error))
            return
        counters.num_commands += 1
        client.answers[message.command_id] = None
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
        """Refuse a command that is not taken. Nothing is sent if its id is one of a known
        command."""
        if refusal.command_id not in client.answers:
            self._context.counters.num_commands_refused += 1
            self._context.send(client, refusal)

    def answered(self, engine: EngineSession, answer: Ack | Nack, now: float) -> None:
        """Take an engine's answer. One that no command waits for is counted and dropped."""
        operation = None if answer.command_id is None else self._running.get(answer.command_id)
        if operation is None or operation.waiting.get(engine.engine_id) is not engine:
            self._context.counters.num_unexpected += 1
            return
        operation.answered(engine, answer, now)
        self._go_on(operation)

    def engine_left(self, engine: EngineSession, now: float) -> None:
        """Report to running commands that an engine has left."""
        for operation in list(self._running.values()):
            operation.lost(engine, now)
            self._go_on(operation)

    def deadline_passed(self, command_id: int, now: float) -> None:
        """Fail a command that runs or waits."""
        if (operation := self._running.get(command_id)) is not None:
            operation.timed_out(now)
            self._go_on(operation)
            return
        (operation,) = [waits for waits in self._queue if waits.command_id == command_id]
        self._queue.remove(operation)
        self._answer(operation, _not_begun(operation))

    def advance(self, now: float) -> bool:
        """Begin the next command if none runs; returns whether there was one."""
        if self.is_busy or not self._queue or self.is_over:
            return False
        operation = self._queue.popleft()
        if now >= operation.deadline_at:
            # Its deadline passed at the same time as that of the command before it.
            self._answer(operation, _not_begun(operation))
        else:
            self._begin(operation, now)
        return True

    def shorten_answer(self, client: ClientSession, command_id: int) -> None:
        """Answer again, without the engines' reports: with them the answer is too large to be
        sent."""
        answer = client.answers.get(command_id)
        if not isinstance(answer, Ack) or answer.result is None:
            return
        shorter = _without_reports(command_id, answer.result)
        client.answers[command_id] = shorter
        self._context.send(client, shorter)

    def close(self, reason: str) -> None:
        """Refuse whatever runs or waits."""
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
            self._go_on(operation)

    def _go_on(self, operation: Operation) -> None:
        """Answer a running command if it has ended, else set its timer: its deadline may have
        moved."""
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
        client.answers[command_id] = answer
        # Commands that wait or run have no answer yet, and keep their entry.
        num_over = len(client.answers) - self._context.limits.max_answers
        for old_id in list(client.answers)[: max(num_over, 0)]:
            if client.answers[old_id] is not None:
                del client.answers[old_id]
        if not client.has_left:
            self._context.send(client, answer)


def _without_reports(command_id: int, outcome: Mapping[str, Any]) -> Ack:
    """Return the answer to a command whose engines' reports no answer can carry."""
    return Ack(command_id=command_id, result={**outcome, "ranks": {}})


def _not_begun(operation: Operation) -> WireError:
    """Return the outcome of a command whose deadline passed while others ran."""
    return WireError.of(
        EngineStateError(f"{operation.name}: not begun in time, others ran before it")
    )
