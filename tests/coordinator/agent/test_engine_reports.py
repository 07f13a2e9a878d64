"""The progress that an engine reports of its requests, and after which steps."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import SamplingParams
from rollout.control.commands import Pause, Unpause
from rollout.coordinator.protocol.messages import (
    AssignRequest,
    EngineReplyPartial,
    Progress,
    Sample,
)
from rollout.coordinator.protocol.packed import pack_params
from tests.coordinator.agent.test_engine_agent import (
    assert_as_undisturbed,
    assignment,
    command,
    entered,
    make_agent,
    reported,
    requests_of,
    send_to,
    steps,
)
from tests.inspected_engine import running_ahead


@pytest.mark.parametrize("num_steps", [12, 13])
def test_the_last_token_of_a_request_is_sent_with_its_end_only(num_steps: int) -> None:
    """With a step in flight the pause takes in a token, and at 13 of 14 steps that is the last."""
    agent = make_agent(change_backend=running_ahead)
    send_to(agent, entered(report_interval_tokens=1))
    send_to(agent, assignment(0))
    before = steps(agent, num_steps)
    answers = send_to(agent, command(Pause, 1))
    run = reported([*before, *answers], 0)
    assert run is not None
    assert len(run) == 13
    send_to(agent, command(Unpause, 2))
    after = steps(agent)
    assert not [m for m in after if isinstance(m, EngineReplyPartial)]
    assert_as_undisturbed(requests_of(after))


def many(num_requests: int, num_streaming: int = 0) -> AssignRequest:
    """Return an engine with requests of 40 tokens; the first ones stream."""
    samples = tuple(
        Sample(
            request_id=index,
            sampling_params=pack_params(
                SamplingParams(
                    num_tokens_to_generate=40, ignore_eos=True, streaming=index < num_streaming
                )
            ),
            seed=index,
        )
        for index in range(num_requests)
    )
    return AssignRequest(samples=samples, prompt_tokens=np.arange(1, 6, dtype=np.int32))


def test_a_step_has_one_report_of_its_share_of_the_requests() -> None:
    """12 requests that are reported every 4 steps: 3 of them after each."""
    agent = make_agent()
    agent.handle(entered(report_interval_tokens=4))
    agent.handle(many(12))
    agent.step()
    last: dict[int, int] = {}
    for step in range(1, 21):
        (progress,) = agent.step()
        assert isinstance(progress, Progress)
        ids = progress.runs.request_ids.tolist()
        assert len(ids) == 3
        if step > 4:
            assert set(progress.runs.counts.tolist()) == {4}
            assert {step - last[request_id] for request_id in ids} == {4}
        last |= dict.fromkeys(ids, step)
    assert len(last) == 12


def test_those_that_stream_are_in_every_report_and_have_no_message_of_their_own() -> None:
    agent = make_agent()
    agent.handle(entered(report_interval_tokens=4))
    agent.handle(many(6, num_streaming=2))
    agent.step()
    for _ in range(8):
        (progress,) = agent.step()
        assert isinstance(progress, Progress)
        assert {0, 1} <= set(progress.runs.request_ids.tolist())


def test_report_times_of_ended_requests_are_reused() -> None:
    agent = make_agent()
    agent.handle(entered(report_interval_tokens=2))
    agent.handle(many(2))
    agent.handle(entered(report_interval_tokens=2))  # which keeps none of them
    agent.handle(many(2))
    agent.step()
    agent.step()
    for _ in range(6):
        (progress,) = agent.step()
        assert isinstance(progress, Progress)
        assert len(progress.runs) == 1
