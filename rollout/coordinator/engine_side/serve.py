"""serve: an engine's life on its line to the coordinator; the main loop of an engine process."""

from __future__ import annotations

import logging

from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.engine_side.link import EngineLink
from rollout.coordinator.protocol.messages import Heartbeat, Message, RegisterAck
from rollout.errors import WeightUpdateError

_logger = logging.getLogger(__name__)

_IDLE_S = 0.5  # longest wait for a message; one that comes is not waited for
_MAX_FAILURES = 3  # of steps in sequence; the requests are back in the queue after each
_MAX_MISSES = 20  # of the fleet's weights, about _IDLE_S apart


def serve(agent: EngineAgent, link: EngineLink) -> None:
    """Do what the coordinator asks, and step while the lease runs, until it says SHUTDOWN.

    Raises what steps raise if several in sequence fail, WeightUpdateError if the weights that the
    fleet serves cannot be had, and RolloutError if the link fails.
    """
    entrance = _Entrance(agent, link)
    num_failures = 0
    while not agent.is_shut_down:
        runs = agent.has_work and link.may_step()
        for message in link.receive(0.0 if runs else _IDLE_S) or entrance.missed:
            if isinstance(message, RegisterAck):
                entrance.take(message)
                continue
            for answer in agent.handle(message):
                link.send(answer)
        if not (agent.has_work and link.may_step()):
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
        for answer in outbox:
            link.send(answer)


class _Entrance:
    """Enters the fleet, which may have given up the weights it named for newer ones by then: it
    will name those. Meanwhile the engine has no work. `missed`: the entry to try again, if any.
    """

    def __init__(self, agent: EngineAgent, link: EngineLink) -> None:
        self._agent, self._link = agent, link
        self._num_misses = 0
        self.missed: list[Message] = []

    def take(self, entry: RegisterAck) -> None:
        try:
            answers = self._agent.handle(entry)
        except WeightUpdateError as error:
            self._num_misses += 1
            if self._num_misses == _MAX_MISSES:
                raise
            _logger.warning("the fleet's weights are not to be had yet: %s", error)
            self.missed = [entry]
            return
        self._num_misses, self.missed = 0, []
        # It gets work once it is known to be there: at once, not with the next beat.
        for answer in (*answers, Heartbeat(sequence=0, status=self._agent.status())):
            self._link.send(answer)
