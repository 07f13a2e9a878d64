"""The Environment protocol, and the types that pass between an environment and the model.

Users implement Environment, as do ToolEnvironment and OpenEnvironment. Used by the other modules of
`trainer_hooks.environments`; HostedEnvironment calls its methods.
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
    """A tool call that cannot be carried out. Raised by `step`; the model reads the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """The model's output in one turn.

    `text`: the whole generated text, without the token that ends the turn.
    `content`: the text without `reasoning`, the model's thoughts, and without tool calls.
    `tool_calls`: calls of any name. `malformed_calls`: texts between a call's tags that cannot be
    read as a call.
    """

    text: str
    content: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    malformed_calls: Sequence[str] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message of OpenAI's protocol.

        Conversation recognises the message and renders it as the generated text.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.content
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to a turn: `messages` for the model, such as a tool's result.

    `is_done`: whether the episode has ended.
    `reward`: reward of this step, added to the other steps'; None for no reward.
    `num_bad_tool_calls`: calls answered by an error, for the metrics.
    """

    messages: Sequence[Message] = ()
    is_done: bool = False
    reward: float | None = None
    num_bad_tool_calls: int = 0


class Environment(Protocol):
    """An environment that the model acts in, one episode at a time. Derive from it, or implement
    its members.

    Each method may be async. Methods that are not async run in the instance's own thread, so they
    may block. An instance serves one rollout at a time. After an episode without a fault it is
    reset for another. An exception fails the rollout. But a ConfigError ends the run, and the model
    reads a ToolCallError of `step`.
    `tools`: schemas of the tools that the model may call, in OpenAI's form; read after each reset.
    """

    tools: Sequence[ToolSchema] = ()

    def reset(
        self, row: Mapping[str, Any]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Start the episode of `row`: the prompt's columns, and the prompt itself as "prompt".

        Discards the state of the last episode. Returns messages to append to the prompt's, or None.
        """
        ...

    def step(self, turn: ModelTurn) -> Step | Awaitable[Step]:
        """Return the answer to a turn of the model.

        The turn's calls name tools of `tools` and have JSON objects as arguments. Other calls are
        left out: the model gets an error for them.
        """
        ...

    def reward(
        self,
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float] | None] | None:
        """Return the reward to add to the steps' rewards. Called once at the end of an episode.

        A mapping holds named parts, which are summed. None adds nothing; without any reward of a
        step, the reward function then scores the episode.
        """
        return None

    def state(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return the JSON-able state at the end of the episode.

        The state goes to completions.jsonl, and to the reward function as `environment_state`.
        """
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release the instance's resources. Called once, after all other calls."""
        return None
