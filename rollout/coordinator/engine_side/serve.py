"""serve: an engine's life on its line to the coordinator; the main loop of an engine process."""

from __future__ import annotations

import logging

from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.engine_side.link import EngineLink

_logger = logging.getLogger(__name__)

_IDLE_S = 0.5  # longest wait for a message; one that comes is not waited for
_MAX_FAILURES = 3  # of steps in sequence; the requests are back in the queue after each


def serve(agent: EngineAgent, link: EngineLink) -> None:
    """Do what the coordinator asks, and step while the lease runs, until it says SHUTDOWN.

    Raises what steps raise if several in sequence fail, and RolloutError if the link fails.
    """
    num_failures = 0
    while not agent.is_shut_down:
        runs = agent.has_work and link.may_step()
        for message in link.receive(0.0 if runs else _IDLE_S):
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
