"""serve: an engine's life on its line to the coordinator; the main loop of an engine process."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.link import Link
from rollout.coordinator.protocol.messages import (
    EngineReply,
    EngineReplyPartial,
    Heartbeat,
    Message,
    RegisterAck,
)
from rollout.errors import ProtocolError, WeightUpdateError

_logger = logging.getLogger(__name__)

_IDLE_S = 0.5  # longest wait for a message; one that comes is not waited for
_MAX_FAILURES = 3  # of steps in sequence, whatever requests they have
_MAX_MISSES = 20  # of the fleet's weights or state, about _IDLE_S apart


def serve(agent: EngineAgent, link: Link) -> None:
    """Do what the coordinator asks, and step while the lease runs, until it says SHUTDOWN.

    Raises what steps raise if several in sequence do, what entering the fleet raises if it fails
    again and again, and RolloutError if the link fails. A request that makes steps fail ends alone;
    steps do not raise for it.
    """
    entrance = _Entrance(agent, link)

    def runs() -> bool:
        return agent.has_work and not entrance.missed and link.may_step()

    num_failures = 0
    while not agent.is_shut_down:
        for message in link.receive(0.0 if runs() else _IDLE_S) or entrance.missed:
            if isinstance(message, RegisterAck):
                entrance.take(message)
            else:
                _send_all(agent, link, agent.handle(message))
        if not runs():
            continue
        try:
            outbox = agent.step()
        except Exception:
            num_failures += 1
            if num_failures == _MAX_FAILURES:
                raise
            _logger.exception("a step failed; its requests are queued again")
            continue
        num_failures = 0
        _send_all(agent, link, outbox)


def _send_all(agent: EngineAgent, link: Link, messages: Iterable[Message]) -> None:
    """What a request brought and no frame can carry ends that request, and nothing else."""
    for message in messages:
        try:
            link.send(message)
        except ProtocolError as error:
            if not isinstance(message, (EngineReply, EngineReplyPartial)):
                raise
            link.send(agent.refuse(message, error))


class _Entrance:
    """Enters the fleet, which may have given up the weights it named for newer ones by then: it
    will name those. Memory may be short for a while, too. Until it is in, the engine does not step.
    `missed`: the entry to try again, if any.
    """

    def __init__(self, agent: EngineAgent, link: Link) -> None:
        self._agent, self._link = agent, link
        self._num_misses = 0
        self.missed: list[Message] = []

    def take(self, entry: RegisterAck) -> None:
        try:
            answers = self._agent.handle(entry)
        except Exception as error:
            self._num_misses += 1
            if self._num_misses == _MAX_MISSES:
                raise
            is_known = isinstance(error, WeightUpdateError)
            _logger.warning("the fleet is not entered yet: %s", error, exc_info=not is_known)
            self.missed = [entry]
            return
        self._num_misses, self.missed = 0, []
        # It gets work once it is known to be there: at once, not with the next beat.
        arrived = Heartbeat(sequence=0, status=self._agent.status())
        _send_all(self._agent, self._link, (*answers, arrived))
