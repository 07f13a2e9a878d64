"""CommandDesk: what clients command, one after the other, each answered once."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from rollout.coordinator.core.command_rules import (
    EPOCH_COMMANDS,
    is_done,
    require_legal,
    require_readable,
)
from rollout.coordinator.core.fleet import CoordinatorState
from rollout.coordinator.core.operations import (
    EpochChange,
    Operation,
    Outcome,
    Parts,
    Question,
    Shutdown,
    StateChange,
)
from rollout.coordinator.core.request_desk import RequestDesk
from rollout.coordinator.core.sessions import ClientPeer, EnginePeer
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
class _Order:
    number: int
    client: ClientPeer
    message: Command | UpdateWeights
    deadline_at: float

    @property
    def name(self) -> str:
        message = self.message
        return message.header.name if isinstance(message, Command) else "UPDATE_WEIGHTS"


class CommandDesk:
    """One command runs at a time, the others wait in order. `is_over` after a SHUTDOWN."""

    def __init__(self, parts: Parts, desk: RequestDesk) -> None:
        self._parts, self._books, self._desk = parts, parts.books, desk
        self._queue: deque[_Order] = deque()
        self._current: tuple[_Order, Operation] | None = None
        self._num_orders = 0
        self.is_over = False

    @property
    def is_busy(self) -> bool:
        """Whether engines are being asked."""
        return self._current is not None

    @property
    def has_any(self) -> bool:
        """Whether a command runs or waits."""
        return self._current is not None or bool(self._queue)

    # ---- what comes

    def submit(self, client: ClientPeer, message: Command | UpdateWeights, now: float) -> None:
        """Queue a command; of a repeated one, only the answer is sent again if there is one."""
        if message.command_id in client.answers:
            answer = client.answers[message.command_id]
            self._books.counters.num_duplicates += 1
            if answer is not None:
                self._books.send(client, answer)
            return
        limits = self._books.limits
        if len(self._queue) >= limits.max_queued_commands:
            self._books.counters.num_commands_refused += 1
            error = EngineStateError(f"{len(self._queue)} commands wait already; try again later")
            self._books.send(client, nack_of(message.command_id, error))
            return
        self._books.counters.num_commands += 1
        client.answers[message.command_id] = None
        deadline_s = limits.command_deadline_s
        if message.deadline_s is not None:
            deadline_s = message.deadline_s
        self._num_orders += 1
        order = _Order(self._num_orders, client, message, now + deadline_s)
        self._books.timers.set(("command", order.number), order.deadline_at)
        self._queue.append(order)

    def answered(self, engine: EnginePeer, answer: Ack | Nack, now: float) -> None:
        """An engine's answer; one that nobody waits for any more is counted and dropped."""
        current = self._current
        if current is not None and current[1].command_id == answer.command_id:
            operation = current[1]
            if operation.waiting.get(engine.engine_id) is engine:
                self._go_on(operation.answered(engine, answer, now))
                return
        self._books.counters.num_unexpected += 1

    def engine_left(self, engine: EnginePeer, now: float) -> None:
        """The running command waits for it no more."""
        if self._current is not None:
            self._go_on(self._current[1].lost(engine, now))

    def deadline_passed(self, number: int, now: float) -> None:
        """Of a command that runs or still waits its turn."""
        if self._current is not None and self._current[0].number == number:
            self._go_on(self._current[1].timed_out(now))
            return
        for order in self._queue:
            if order.number == number:
                self._queue.remove(order)
                self._answer(order, _not_begun(order))
                return

    def advance(self, now: float) -> bool:
        """Begin the next command if none runs; returns whether there was one."""
        if self._current is not None or not self._queue or self.is_over:
            return False
        order = self._queue.popleft()
        if now >= order.deadline_at:
            # It passed together with that of the one before, which was looked at first.
            self._answer(order, _not_begun(order))
            return True
        try:
            outcome = self._begin(order, now)
        except RolloutError as error:
            outcome = Outcome({}, WireError.of(error))
        if self._current is None:
            assert outcome is not None, "a command that is not running has ended"
            self._answer(order, outcome)
        else:
            self._go_on(outcome)
        return True

    def shorten_answer(self, client: ClientPeer, command_id: int) -> None:
        """An answer cannot be sent: the client hears that it is done, and no more."""
        client.answers[command_id] = Ack(command_id=command_id)
        self._books.send(client, Ack(command_id=command_id))

    def close(self, reason: str) -> None:
        """Refuse whatever runs or waits."""
        error = WireError.of(RequestAbortedError(reason))
        if self._current is not None:
            self._go_on(Outcome({}, error))
        while self._queue:
            self._answer(self._queue.popleft(), Outcome({}, error))

    # ---- what becomes of it

    def _begin(self, order: _Order, now: float) -> Outcome | None:
        parts, message = self._parts, order.message
        operation: Operation
        if isinstance(message, UpdateWeights):
            require_legal(parts.fleet, message)
            operation = WeightCommit(parts, message, order.deadline_at)
        else:
            require_legal(parts.fleet, message)
            require_readable(message)
            if message.header is Headers.SHUTDOWN:
                operation = Shutdown(parts, message, order.deadline_at)
            elif message.header is Headers.STATS:
                operation = Question(parts, message, order.deadline_at)
            elif message.header in EPOCH_COMMANDS:
                operation = EpochChange(parts, message, order.deadline_at)
            elif is_done(parts.fleet, message.header):
                return Operation(parts, order.name, order.deadline_at).done()
            else:
                operation = StateChange(parts, message, order.deadline_at)
        self._current = (order, operation)
        return operation.begin(now)

    def _go_on(self, outcome: Outcome | None) -> None:
        """Answer the running command if it has ended; its deadline may have moved if not."""
        assert self._current is not None
        order, operation = self._current
        if outcome is None:
            self._books.timers.set(("command", order.number), operation.deadline_at)
            return
        self._current = None
        self._answer(order, outcome)
        if isinstance(operation, Shutdown):
            self.is_over = True
        elif self._parts.fleet.state is CoordinatorState.STOPPING:
            error = RequestAbortedError("the engines were stopped before the request had ended")
            self._desk.fail_all(WireError.of(error))

    def _answer(self, order: _Order, outcome: Outcome) -> None:
        self._books.timers.cancel(("command", order.number))
        command_id, client = order.message.command_id, order.client
        answer: Ack | Nack
        if outcome.error is None:
            answer = Ack(command_id=command_id, result=outcome.result)
        else:
            self._books.counters.num_commands_refused += 1
            answer = Nack(command_id=command_id, error=outcome.error)
            logger.info("%s of %s: %s", order.name, client, outcome.error.message)
        client.answers[command_id] = answer
        self._forget_old_answers(client)
        if self._books.sessions.clients.get(client.client_id) is client:
            self._books.send(client, answer)

    def _forget_old_answers(self, client: ClientPeer) -> None:
        """Those of commands that wait or run are not old."""
        num_over = len(client.answers) - self._books.limits.max_answers
        for command_id in list(client.answers)[: max(num_over, 0)]:
            if client.answers[command_id] is not None:
                del client.answers[command_id]


def _not_begun(order: _Order) -> Outcome:
    """The outcome where the deadline passed while others ran."""
    error = EngineStateError(f"{order.name}: not begun in time, others ran before it")
    return Outcome({}, WireError.of(error))
