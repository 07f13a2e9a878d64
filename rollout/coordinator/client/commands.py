"""PendingCommands: the commands of one client, until they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout.coordinator.client.streams import set_exception
from rollout.coordinator.protocol.codec import require_valid
from rollout.coordinator.protocol.messages import (
    Ack,
    Command,
    ConnectAck,
    Message,
    Nack,
    UpdateWeights,
    command_name,
)
from rollout.errors import CoordinatorLostError, RolloutError

CommandFuture = asyncio.Future[dict[str, Any]]


class PendingCommands:
    """Futures by command id, in one event loop. A failure that nobody awaits is not reported."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._grace_s = 0.0  # how long after a deadline the coordinator may still answer
        self._futures: dict[int, CommandFuture] = {}

    def welcome(self, ack: ConnectAck) -> None:
        """Take the grace period from the coordinator's ConnectAck."""
        self._grace_s = ack.answer_grace_s

    def submit(self, command: Command | UpdateWeights) -> CommandFuture:
        """Send a command. Returns the future of its result. Raises ProtocolError if it is
        malformed.

        The coordinator keeps the deadline; a grace period later the future fails by itself.
        """
        loop, command_id = asyncio.get_running_loop(), command.command_id
        future: CommandFuture = loop.create_future()
        require_valid(command)  # it has values of a user
        self._send(command)
        self._futures[command_id] = future
        future.add_done_callback(_retrieve_exception)
        future.add_done_callback(lambda _: self._futures.pop(command_id, None))
        if command.deadline_s is not None:
            limit_s = command.deadline_s + self._grace_s
            name = command_name(command)
            error = CoordinatorLostError(f"{name} has no answer after {limit_s:g} s")
            timer = loop.call_later(limit_s, set_exception, future, error)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def take(self, answer: Ack | Nack) -> None:
        """Resolve a command's future. An answer without one belongs to a command that was given
        up."""
        future = None if answer.command_id is None else self._futures.get(answer.command_id)
        if future is None or future.done():
            return
        if isinstance(answer, Ack):
            future.set_result(dict(answer.result))
        else:
            future.set_exception(answer.error.to_error())

    def fail(self, error: RolloutError) -> None:
        """Fail all futures."""
        for future in list(self._futures.values()):
            set_exception(future, type(error)(*error.args))


def _retrieve_exception(future: CommandFuture) -> None:
    """Mark the exception as retrieved, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
