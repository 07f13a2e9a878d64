"""ClientCommands: what one client has ordered, until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollout.coordinator.client.requests import fail_after
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.coordinator.protocol.messages import (
    Ack,
    Command,
    Message,
    Nack,
    UpdateWeights,
    error_from,
)
from rollout.errors import RolloutError

Order = Command | UpdateWeights
CommandFuture = asyncio.Future[dict[str, Any]]


class ClientCommands:
    """Futures by command id. Lives in one event loop. One that nobody looks at warns nobody."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._pending: dict[int, tuple[Order, CommandFuture]] = {}

    def order(self, order: Order, grace_s: float) -> CommandFuture:
        """Send it. Returns the future of its result. Raises ProtocolError if it cannot be sent.

        The coordinator keeps the deadline; `grace_s` seconds later the future fails by itself.
        """
        future: CommandFuture = asyncio.get_running_loop().create_future()
        self._send(order)
        self._pending[order.command_id] = (order, future)
        future.add_done_callback(_look_at)
        future.add_done_callback(lambda _: self._pending.pop(order.command_id, None))
        if order.deadline_s is not None:
            fail_after(future, order.deadline_s + grace_s, f"{_name(order)} has no answer")
        return future

    def take(self, answer: Ack | Nack) -> None:
        """Resolve the future of a command; an answer to none is of one that was given up."""
        _, future = self._pending.get(-1 if answer.command_id is None else answer.command_id, NONE)
        if future is None or future.done():
            return
        if isinstance(answer, Ack):
            future.set_result(dict(answer.result))
        else:
            future.set_exception(error_from(answer))

    def welcome(self, is_known: bool) -> None:
        """Repeat all to a coordinator that is back. What it may have forgotten fails instead: it
        would be done twice.
        """
        for order, future in list(self._pending.values()):
            if is_known:
                self._send(order)
            elif not future.done():
                future.set_exception(
                    CoordinatorLostError(
                        f"the coordinator has forgotten {_name(order)}; whether it was done is "
                        "unknown, give it again if need be"
                    )
                )

    def fail(self, error: RolloutError) -> None:
        """End all futures."""
        for _, future in list(self._pending.values()):
            if not future.done():
                future.set_exception(type(error)(*error.args))


NONE: tuple[None, None] = (None, None)


def _look_at(future: CommandFuture) -> None:
    """Retrieve the exception, so that asyncio does not report one nobody has asked for."""
    if not future.cancelled():
        future.exception()


def _name(order: Order) -> str:
    return order.header.name if isinstance(order, Command) else "UPDATE_WEIGHTS"
