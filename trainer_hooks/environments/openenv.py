"""OpenEnvironment: an environment behind an OpenEnv server, by the client of the package openenv.

    make = functools.partial(OpenEnvironment, "http://127.0.0.1:8000", action_field="message")
    async with EnvironmentRollouts(make, tokenizer, max_environments=16) as rollout_fn: ...

Used by users, and by training jobs that name it as `environment.path`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.environments.protocol import Environment, Message, ModelTurn, Step


class OpenEnvironment(Environment):
    """A session with an OpenEnv server, which is kept from episode to episode.

    The content of each turn becomes the field `action_field` of the server's action. Each
    observation becomes a user message with its field `observation_field`. If `observation_field` is
    None, the message has the whole observation as JSON. Override `action` and `message` to change
    this. The reward is the sum of the steps' rewards, and the state is the server's.
    `max_environments` of EnvironmentRollouts must not exceed the server's `max_concurrent_envs`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        action_field: str,
        observation_field: str | None = None,
        reset_columns: Sequence[str] = (),
        message_timeout_s: float = 60.0,
    ) -> None:
        """Prepare a session. Raises ConfigError if the package openenv is missing.

        `base_url`: address of the server.
        `reset_columns`: columns of the prompt that become arguments of the server's reset, such as
            "seed".
        `message_timeout_s`: seconds for each answer of the server.
        """
        try:
            from openenv.core import GenericEnvClient
        except ImportError as error:
            raise ConfigError(
                "environments behind an OpenEnv server need its client: pip install openenv "
                "(extra 'openenv')"
            ) from error
        self._client = GenericEnvClient(base_url, message_timeout_s=message_timeout_s)
        self._action_field, self._observation_field = action_field, observation_field
        self._reset_columns = list(reset_columns)
        self._rewards: list[float | None] = []  # rewards of this episode's steps

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Start an episode on the server and return its first observation as messages. Raises
        ConfigError for a row that lacks one of `reset_columns`."""
        if missing := [name for name in self._reset_columns if name not in row]:
            raise ConfigError(f"the prompt lacks the columns {missing}, which reset_columns names")
        self._rewards = []
        result = await self._client.reset(**{name: row[name] for name in self._reset_columns})
        return self._messages(result.observation)

    async def step(self, turn: ModelTurn) -> Step:
        """Send the turn's action and return the server's observation and reward."""
        result = await self._client.step(self.action(turn))
        reward = None if result.reward is None else float(result.reward)
        self._rewards.append(reward)
        return Step(
            messages=self._messages(result.observation), is_done=bool(result.done), reward=reward
        )

    def reward(self) -> float | None:
        """Return 0, to which the steps' rewards are added, or None if all steps were without a
        reward."""
        has_reward = not self._rewards or any(each is not None for each in self._rewards)
        return 0.0 if has_reward else None

    async def state(self) -> Mapping[str, Any]:
        """Return the server's state of this session."""
        state: Mapping[str, Any] = await self._client.state()
        return state

    async def close(self) -> None:
        await self._client.close()

    def action(self, turn: ModelTurn) -> dict[str, Any]:
        """Return the server's action for a turn of the model."""
        return {self._action_field: turn.content}

    def message(self, observation: Mapping[str, Any]) -> Message | None:
        """Return an observation as the message that the model reads, or None for no message."""
        content = observation
        if self._observation_field is not None:
            content = observation[self._observation_field]
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        return {"role": "user", "content": text}

    def _messages(self, observation: Mapping[str, Any]) -> list[Message]:
        message = self.message(observation)
        return [] if message is None else [message]
