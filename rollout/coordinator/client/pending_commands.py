"""PendingCommands: what one client has ordered, until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout.coordinator.client.streams import set_exception
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.coordinator.protocol.messages import (
    Ack,
    Command,
    Message,
    Nack,
    UpdateWeights,
    command_name,
)
from rollout.errors import RolloutError

CommandFuture = asyncio.Future[dict[str, Any]]


class PendingCommands:
    """Futures by command id. Lives in one event loop. One that nobody looks at warns nobody.
    `grace_s`: how long after a deadline the coordinator may still answer, as it says."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self.grace_s = send, 0.0
        self._futures: dict[int, CommandFuture] = {}

    def submit(self, command: Command | UpdateWeights) -> CommandFuture:
        """Send it. Returns the future of its result. Raises ProtocolError if it cannot be sent.

        The coordinator keeps the deadline; `grace_s` later the future fails by itself.
        """
        loop, command_id = asyncio.get_running_loop(), command.command_id
        future: CommandFuture = loop.create_future()
        self._send(command)
        self._futures[command_id] = future
        future.add_done_callback(_retrieve_exception)
        future.add_done_callback(lambda _: self._futures.pop(command_id, None))
        if command.deadline_s is not None:
            limit_s = command.deadline_s + self.grace_s
            name = command_name(command)
            error = CoordinatorLostError(f"{name} has no answer after {limit_s:g} s")
            timer = loop.call_later(limit_s, set_exception, future, error)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def take(self, answer: Ack | Nack) -> None:
        """Resolve the future of a command; an answer to none is of one that was given up."""
        future = None if answer.command_id is None else self._futures.get(answer.command_id)
        if future is None or future.done():
            return
        if isinstance(answer, Ack):
            future.set_result(dict(answer.result))
        else:
            future.set_exception(answer.error.to_error())

    def fail(self, error: RolloutError) -> None:
        """End all futures."""
        for future in list(self._futures.values()):
            set_exception(future, type(error)(*error.args))


def _retrieve_exception(future: CommandFuture) -> None:
    """So that asyncio does not report one that nobody has asked for."""
    if not future.cancelled():
        future.exception()
