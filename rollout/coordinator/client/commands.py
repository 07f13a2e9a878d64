"""PendingCommands: the commands of one client, until they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.control.commands import ControlMessage, FleetResults, R, engine_state_of
from rollout.control.state import EngineState
from rollout.coordinator.client.streams import set_exception
from rollout.coordinator.protocol.codec import require_valid
from rollout.coordinator.protocol.messages import Ack, ConnectAck, Nack
from rollout.errors import CoordinatorLostError, RolloutError
from rollout.wire import Message

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A command without an answer. read: makes the future's result of the engines' results."""

    command: ControlMessage[Any]
    future: asyncio.Future[Any]
    read: Callable[[FleetResults[Any]], Any]


class PendingCommands:
    """Futures by command id, in one event loop. A failure that nobody awaits is not reported.

    state, weights_version: the fleet's, by the latest answer of the coordinator.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._grace_s = 0.0  # how long after a deadline the coordinator may still answer
        self._pending: dict[int, _Pending] = {}
        self.state, self.weights_version = EngineState.RUNNING, 0

    def connected(self, ack: ConnectAck) -> None:
        """Take the fleet's state and the grace period from the coordinator's ConnectAck."""
        self._grace_s = ack.answer_grace_s
        self.state, self.weights_version = engine_state_of(ack.state), ack.weights_version

    def submit(
        self, command: ControlMessage[R], read: Callable[[FleetResults[R]], _T]
    ) -> asyncio.Future[_T]:
        """Send a command. Returns the future of what `read` makes of the engines' results. Raises
        ConfigError for an argument of a wrong type.

        The coordinator keeps the deadline; a grace period later the future fails by itself.
        """
        command.check()
        loop, command_id = asyncio.get_running_loop(), command.command_id
        future: asyncio.Future[_T] = loop.create_future()
        require_valid(command)  # it has values of a user
        self._send(command)
        self._pending[command_id] = _Pending(command, future, read)
        future.add_done_callback(_retrieve_exception)
        future.add_done_callback(lambda _: self._pending.pop(command_id, None))
        if command.deadline_s is not None:
            limit_s = command.deadline_s + self._grace_s
            error = CoordinatorLostError(f"{command.name} has no answer after {limit_s:g} s")
            timer = loop.call_later(limit_s, set_exception, future, error)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def take(self, answer: Ack | Nack) -> None:
        """Resolve a command's future. Ignores an answer to a command that was given up."""
        pending = None if answer.command_id is None else self._pending.get(answer.command_id)
        if pending is None or pending.future.done():
            return
        if isinstance(answer, Nack):
            pending.future.set_exception(answer.error.to_error())
            return
        try:
            results = pending.command.read(answer.result or {})
            self.state = engine_state_of(results.state)
            self.weights_version = results.weights_version
            pending.future.set_result(pending.read(results))
        except RolloutError as error:  # the answer is malformed, or engines disagree
            pending.future.set_exception(error)

    def fail(self, error: RolloutError) -> None:
        """Fail all futures."""
        for pending in list(self._pending.values()):
            set_exception(pending.future, type(error)(*error.args))


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
