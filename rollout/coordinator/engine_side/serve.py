"""serve: an engine's life on its line to the coordinator; the main loop of an engine process."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.link import Link
from rollout.coordinator.protocol.messages import Message
from rollout.errors import ProtocolError

_logger = logging.getLogger(__name__)
_MAX_FAILURES = 3  # of steps in sequence, whatever requests they have


def serve(agent: EngineAgent, link: Link) -> None:
    """Do what the coordinator asks, and step while the lease runs, until it says SHUTDOWN.

    Raises what steps raise if several in sequence do, what entering the fleet raises if it fails
    again and again, and RolloutError if the link fails. A request that makes steps fail ends alone;
    steps do not raise for it. If steps do, the goodbye names the requests that were in them.
    """
    num_failures = 0
    try:
        while not agent.is_shut_down:
            runs = agent.has_work and link.may_step()
            for message in link.receive(0.0 if runs else agent.max_idle_s):
                _queue_all(agent, link, agent.handle(message))
            may_step = link.may_step()
            _queue_all(agent, link, agent.poll(may_step=may_step))
            link.flush()
            if not (agent.has_work and may_step):
                continue
            try:
                outbox = agent.step()
            except Exception as error:  # one step may fail for a reason that passes
                num_failures += 1
                if num_failures == _MAX_FAILURES:
                    link.close(f"it failed: {error!r}", is_fault=True, suspects=agent.suspects)
                    raise
                _logger.exception("a step failed; its requests are queued again")
                continue
            num_failures = 0
            _queue_all(agent, link, outbox)
            link.flush()
    finally:
        agent.close()


def _queue_all(agent: EngineAgent, link: Link, messages: Iterable[Message]) -> None:
    for message in messages:
        try:
            link.queue(message)
        except ProtocolError as error:
            _queue_all(agent, link, agent.instead_of(message, error))
