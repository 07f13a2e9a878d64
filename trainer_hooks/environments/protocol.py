"""The Environment protocol, and the types that pass between an environment and the model.

Users implement Environment, as do ToolEnvironment and OpenEnvironment. Used by
`trainer_hooks.environments` (episodes, pool, conversation, chat_session, tools, openenv).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.errors import RolloutError
from rollout.tool_calls import ToolCall

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as chat templates take it
ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": ...}}


class ToolCallError(RolloutError):
    """A tool call cannot be carried out. `step` raises it, and the model reads the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """The model's output in one turn.

    `text`: the whole generated text, without the token that ends the turn.
    `content`: the text without thoughts and tool calls.
    `reasoning`: the model's thoughts.
    `tool_calls`: calls of any name.
    `malformed_calls`: texts between a call's tags that are no calls.
    """

    text: str
    content: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    malformed_calls: Sequence[str] = ()

    @property
    def message(self) -> dict[str, Any]:
        """Return the turn as a message of OpenAI's protocol. Conversation recognises the message
        and renders it as the generated text."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.content
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to a turn.

    `messages`: messages for the model, such as a tool's result.
    `is_done`: whether the episode has ended.
    `reward`: reward of this step, which is added to the other steps' rewards. None adds nothing.
    `num_bad_tool_calls`: number of calls answered by an error, for the metrics.
    """

    messages: Sequence[Message] = ()
    is_done: bool = False
    reward: float | None = None
    num_bad_tool_calls: int = 0


class Environment(Protocol):
    """An environment in which the model acts, one episode at a time. Derive from it, or implement
    its members.

    Each method can be async. A method that is not async can block, because it runs in the
    instance's own thread. An instance serves one rollout at a time. After an episode without a
    fault it is reset for another one. An exception fails the rollout, but a ConfigError ends the
    run. The model reads a ToolCallError of `step`.

    `tools`: schemas of the tools that the model can call, in OpenAI's form. EnvironmentRollouts
        reads them after each reset.
    """

    tools: Sequence[ToolSchema] = ()

    def reset(
        self, row: Mapping[str, Any]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Start the episode of `row`: the prompt's columns, and the prompt itself as "prompt".

        Discards the last episode's state. Returns messages to append to the prompt's messages, or
        None.
        """
        ...

    def step(self, turn: ModelTurn) -> Step | Awaitable[Step]:
        """Return the answer to a turn of the model.

        The turn's calls name tools of `tools` and have JSON objects as arguments. All other calls
        are removed from the turn, and the model gets an error for each.
        """
        ...

    def reward(
        self,
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float] | None] | None:
        """Return the reward to add to the steps' rewards.

        Called once at the end of an episode. A mapping has named parts, which are summed. None adds
        nothing. If no step has a reward either, the reward function scores the episode.
        """
        return None

    def state(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return the state at the end of the episode, which JSON can express. It goes to
        completions.jsonl, and to the reward function as `environment_state`."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release the instance's resources. Called once, after all other calls."""
        return None
