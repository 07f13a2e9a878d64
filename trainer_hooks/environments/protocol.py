"""The Environment protocol, and the types that pass between an environment and the model.

Implemented by users; pool and episodes call it.
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
    """A tool call that cannot be carried out. The model reads the message and continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """The model's output in one turn.

    `text`: the whole generated text, without the token that ends the turn. `content`: the text
    without tool calls and without `reasoning`, the thoughts. `tool_calls`: calls of any name;
    `malformed_calls`: texts between a call's tags that are not calls.
    """

    text: str
    content: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    malformed_calls: Sequence[str] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message of OpenAI's protocol. Conversation recognises it and renders the
        generated text.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.content
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to a turn: `messages` for the model, such as a tool's result.

    `is_done`: the episode has ended. `reward`: reward of this step; the rewards of all steps are
    added. `num_bad_tool_calls`: calls answered by an error, for the metrics.
    """

    messages: Sequence[Message] = ()
    is_done: bool = False
    reward: float | None = None
    num_bad_tool_calls: int = 0


class Environment(Protocol):
    """An environment that the model acts in, one episode at a time. Derive from it, or implement
    its members.

    Each method may be async. Other methods run in one thread for the whole life of an instance, so
    they may block. An instance serves one rollout at a time; after an episode without a fault it is
    reset for another. An exception fails the rollout; a ToolCallError goes to the model instead,
    and a ConfigError ends the run.
    `tools`: schemas of the tools that the model may call, in OpenAI's form; read after each reset.
    """

    tools: Sequence[ToolSchema] = ()

    def reset(
        self, row: Mapping[str, Any]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin the episode of `row`, the prompt's columns, whatever state the last episode left.

        Returns messages that follow the prompt's messages, if any.
        """
        ...

    def step(self, turn: ModelTurn) -> Step | Awaitable[Step]:
        """Answer a turn of the model. Its calls name tools of `tools` and have JSON objects as
        arguments.

        Other calls have been answered already and are left out.
        """
        ...

    def reward(
        self,
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float] | None] | None:
        """Return the episode's reward in addition to its steps' rewards. Called once at the end.

        A mapping holds named parts, which are summed. None leaves the reward to the reward
        function.
        """
        return None

    def state(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return the JSON-able state at the end of the episode.

        It goes to completions.jsonl, and to the reward function as its column `environment_state`.
        """
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release what the instance holds. Called once, after all other calls."""
        return None
