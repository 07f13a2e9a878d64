"""serve: the main loop of an engine process."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rollout.coordinator.agent.agent import EngineAgent
from rollout.coordinator.net.link import Link
from rollout.errors import LockstepError, ProtocolError
from rollout.wire import Message

_logger = logging.getLogger(__name__)
_MAX_FAILURES = 3  # of steps in sequence, whatever requests they have


def serve(agent: EngineAgent, link: Link) -> None:
    """Do what the coordinator asks, and step while the lease is valid, until a SHUTDOWN.

    Raises a step's error after three failed steps in sequence, the last error if the fleet could
    not be entered, and RolloutError if the link fails. A request that makes a step fail ends alone,
    and the step does not raise. A LockstepError ends it at once, also without work. If steps raise,
    the Disconnect names the requests of the last one.
    """
    num_failures = 0
    try:
        while not agent.is_shut_down:
            agent.check_ranks()
            runs = agent.has_work and link.may_step()
            for message in link.receive(0.0 if runs else agent.max_idle_s):
                _queue_all(agent, link, agent.handle(message))
            may_step = link.may_step()
            _queue_all(agent, link, agent.poll(may_step=may_step))
            link.flush()
            # Asked again: `poll` may have taken seconds.
            if not (agent.has_work and may_step and link.may_step()):
                continue
            try:
                outbox = agent.step()
            except LockstepError:
                raise
            except Exception as error:  # one step may fail for a reason that passes
                num_failures += 1
                if num_failures == _MAX_FAILURES or agent.is_broken:
                    link.close(f"it failed: {error!r}", is_fault=True, suspects=agent.suspects)
                    raise
                _logger.exception("a step failed; its requests are queued again")
                continue
            num_failures = 0
            _queue_all(agent, link, outbox)
            link.flush()
    except LockstepError as error:  # in whatever it did last: no step can run any more
        link.close(f"it failed: {error!r}", is_fault=True, suspects=agent.suspects)
        raise
    finally:
        agent.close()


def _queue_all(agent: EngineAgent, link: Link, messages: Iterable[Message]) -> None:
    for message in messages:
        try:
            link.queue(message)
        except ProtocolError as error:
            _queue_all(agent, link, agent.instead_of(message, error))
