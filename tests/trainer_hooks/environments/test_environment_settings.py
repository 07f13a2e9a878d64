"""EnvironmentSettings and environment_rollouts: what they create, and which limits are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollout.errors import ConfigError
from tests.trainer_hooks.environments.chat_tokenizer import chat_tokenizer
from trainer_hooks import PromptItem
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.environments.chat_session import ChatSession
from trainer_hooks.train.settings import EnvironmentSettings
from trainer_hooks.train.task import environment_rollouts


class Agent(AgentRollouts):
    """An AgentRollouts without rows, which is never run."""

    @classmethod
    def load(
        cls, name: str, tokenizer: Any, args: Mapping[str, Any] | None = None, **options: Any
    ) -> Agent:
        return cls(name, tokenizer, **options)

    def prompts(self) -> Sequence[PromptItem]:
        return []

    async def run(self, session: ChatSession, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {}


def agent_of(**limits: Any) -> object:
    options = {"name": "quiz"}
    settings = EnvironmentSettings(path=f"{__name__}:Agent", options=options, **limits)
    return environment_rollouts(settings, chat_tokenizer(), {}, 512)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_turns", 4),
        ("max_total_tokens", 256),
        ("step_timeout_s", 5.0),
        ("step_timeout_s", None),
        ("max_environments", 8),
    ],
)
def test_environment_limit_that_agent_rollouts_ignore_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.{name}={value} .*:Agent"):
        agent_of(**{name: value})


def test_agent_rollouts_get_rollout_timeout_s() -> None:
    assert isinstance(agent_of(), Agent)
    assert isinstance(agent_of(rollout_timeout_s=30.0), Agent)
    with pytest.raises(ConfigError, match=r"rollout_timeout_s=-1\.0 must"):
        agent_of(rollout_timeout_s=-1.0)


def test_max_total_tokens_defaults_to_the_engines_max_sequence_length() -> None:
    assert EnvironmentSettings().limits(512).max_total_tokens == 512
    assert EnvironmentSettings(max_total_tokens=256).limits(512).max_total_tokens == 256
    with pytest.raises(ConfigError, match=r"max_total_tokens=0 must be .*at least 1"):
        EnvironmentSettings(max_total_tokens=0).limits(512)
