"""Messages that a coordinator sends right before its Disconnect are handled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.control.commands import Command
from rollout.control.state import EngineState
from rollout.coordinator.client.inference_client import InferenceClient
from rollout.coordinator.protocol.messages import (
    Ack,
    Disconnect,
    EngineReply,
    SubmitRequest,
    WireError,
)
from rollout.errors import CoordinatorLostError, EngineStateError
from tests.coordinator.scripted_router import BOUND_S, ScriptedRouter


def test_answers_that_arrive_together_with_a_disconnect_are_handled() -> None:
    reports: list[dict[str, Any]] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        with ScriptedRouter() as router:
            async with InferenceClient(router.address) as client:
                shutting_down, unanswered = client.shutdown_engines(), client.pause_engines()
                request = client.add_request([1], SamplingParams(num_tokens_to_generate=1))
                # Blocking on purpose: the client's loop finds all three at once.
                shutdown = router.wait_for(Command)[0]
                submitted = router.wait_for(SubmitRequest)[0].samples[0]
                ended = {"state": "STOPPING", "weights_version": 0}
                failure = WireError.of(EngineStateError("stopped"))
                router.send(
                    Ack(
                        command_id=shutdown.command_id,
                        result=ended,
                    ),
                    EngineReply(request_id=submitted.request_id, error=failure, is_failed=True),
                    Disconnect(reason="shut down"),
                )
                assert await asyncio.wait_for(shutting_down, BOUND_S) is None
                assert client.state is EngineState.STOPPED
                with pytest.raises(EngineStateError, match="stopped"):
                    await asyncio.wait_for(request, BOUND_S)
                with pytest.raises(CoordinatorLostError, match="shut down"):
                    await asyncio.wait_for(unanswered, BOUND_S)
                await asyncio.sleep(0.05)  # the reply's acknowledgement would be due, to nobody

    asyncio.run(work())
    assert reports == []
