"""What an engine tells of requests that end while no step runs."""

from __future__ import annotations

import pytest

from rollout.coordinator.protocol.headers import Headers
from rollout.coordinator.protocol.messages import EngineReplyPartial
from tests.coordinator.engine_side.test_engine_agent import (
    assert_as_undisturbed,
    assignment,
    command,
    entered,
    make_agent,
    requests_of,
    steps,
    tell,
    told,
)


@pytest.mark.parametrize("num_steps", [12, 13])
def test_the_last_token_of_a_request_is_told_with_its_end_only(num_steps: int) -> None:
    """With a step in flight the pause takes in a token, and at 13 of 14 steps that is the last."""
    agent = make_agent()
    agent._engine._pipeline._runner._backend.executor.overlaps = True
    tell(agent, entered(report_interval_tokens=1))
    tell(agent, assignment(0))
    before = steps(agent, num_steps)
    answers = tell(agent, command(Headers.PAUSE, 1))
    run = told([*before, *answers], 0)
    assert run is not None
    assert len(run) == 13
    tell(agent, command(Headers.UNPAUSE, 2))
    after = steps(agent)
    assert not [m for m in after if isinstance(m, EngineReplyPartial)]
    assert_as_undisturbed(requests_of(after))
