"""OpenEnvironment against an OpenEnv server in a process of its own."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout import LLM, SamplingParams
from rollout.errors import ConfigError
from tests.serve import chat_model
from trainer_hooks import AsyncRolloutProducer, ThreadedLLM
from trainer_hooks.environments import EnvironmentRollouts, EpisodeLimits, ModelTurn
from trainer_hooks.environments.openenv import OpenEnvironment

MAX_SESSIONS = 4
CALLS = [chat_model.CALL, chat_model.LLAMA_CALL]


def test_missing_optional_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigError, match="pip install openenv"):
        OpenEnvironment("http://127.0.0.1:1", action_field="text")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a running server."""
    pytest.importorskip("openenv")
    script = Path(__file__).with_name("openenv_server.py")
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = server.stdout.readline().strip()  # it listens by then
        assert port, "the server did not start"
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def test_open_environment_episode_has_the_servers_rewards_and_state(url: str) -> None:
    async def episode() -> None:
        environment = OpenEnvironment(
            url, action_field="text", observation_field="hint", reset_columns=["seed"]
        )
        try:
            assert await environment.reset({"seed": 7}) == [{"role": "user", "content": "begin 7"}]
            steps = [await environment.step(ModelTurn(text=t, content=t)) for t in ("a", "bo", "x")]
            assert [step.reward for step in steps] == [1.0, 0.5, 0.0]
            assert [step.is_done for step in steps] == [False, False, True]
            assert steps[1].messages == [{"role": "user", "content": "more 2"}]
            state = await environment.state()
            assert (state["episode_id"], state["step_count"]) == ("seed 7", 3)
            with pytest.raises(ConfigError, match=r"lacks the columns \['seed'\]"):
                await environment.reset({})
        finally:
            await environment.close()

    asyncio.run(episode())


def test_open_environment_server_errors_fail_one_rollout_alone(url: str) -> None:
    directory = chat_model.directory()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    params = SamplingParams(
        num_tokens_to_generate=12,
        return_log_probs=True,
        logprobs_mode="temperature",
        # Turns end, and call no tools, of which there are none.
        logit_bias={tokenizer.eos_token_id: 4.0}
        | dict.fromkeys(tokenizer.convert_tokens_to_ids(CALLS), -100.0),
    )
    rows = [{"prompt": "Say something.", "seed": seed} for seed in range(4)]
    make = functools.partial(OpenEnvironment, url, action_field="text", reset_columns=["seed"])

    async def batch(llm: ThreadedLLM) -> Any:
        limits = EpisodeLimits(max_turns=5)
        async with (
            EnvironmentRollouts(
                make, tokenizer, limits, max_environments=MAX_SESSIONS
            ) as rollout_fn,
            AsyncRolloutProducer(
                llm,
                rows,
                None,
                4,
                4,
                max_staleness_versions=0,
                rollout_fn=rollout_fn,
                sampling_params=params,
                min_valid_samples=0,
            ) as producer,
        ):
            return await anext(producer)

    with LLM(directory, max_sequence_length=512, buffer_size_gb=0.02) as direct:
        groups = asyncio.run(batch(ThreadedLLM(direct))).groups
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    for group, rollout in rollouts:
        texts = [tokenizer.decode(turn.generated_tokens) for turn in rollout.requests]
        if rollout.failure is not None:
            assert rollout.failure == "step_error"
            assert "!" in texts[-1]
            continue
        state = rollout.state["environment"]
        assert state["episode_id"] == f"seed {group.item.columns['seed']}"
        assert 0.0 <= rollout.reward <= 3.0
        if rollout.state["end"] == "done":
            assert state["step_count"] == len(texts) == 3
    ends = {rollout.state["end"] for _, rollout in rollouts}
    assert {"done", "length"} <= ends
