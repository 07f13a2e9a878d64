"""What an environment is: the protocol, and what passes between it and the model."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.errors import RolloutError
from rollout.tool_calls import ToolCall

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as chat templates take it
ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": ...}}


class ToolCallError(RolloutError):
    """A tool call that cannot be carried out. The model reads the message and goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """What the model said in one turn.

    `text`: all of it, as it was generated, without the token that ends the turn. `content`: without
    tool calls, and without `reasoning`, the thoughts. `tool_calls`: calls of any name;
    `malformed_calls`: what stands between tags of a call and is none.
    """

    text: str
    content: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    malformed_calls: Sequence[str] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message of OpenAI's protocol. A Conversation knows it again, and renders
        the text as it was generated.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.content
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment answers: `messages` for the model, such as a tool's result.

    `is_done`: the episode has ended, and the model says no more. `reward`: of this step; those of
    all steps are added up. `num_bad_tool_calls`: calls that got an error for an answer; they are
    counted.
    """

    messages: Sequence[Message] = ()
    is_done: bool = False
    reward: float | None = None
    num_bad_tool_calls: int = 0


class Environment(Protocol):
    """One episode at a time: what the model acts on. Derive from it, or have the same members.

    Each method may be async. Those that are not run in one thread of their own, the same for the
    whole life of an instance, so they may take their time. An instance serves one rollout at a
    time; after an episode without a fault it is reset for another one. An exception ends the
    rollout, which has failed; a ToolCallError goes to the model instead, and a ConfigError ends the
    run.
    `tools`: schemas of the tools that the model may call, in OpenAI's form; read after a reset.
    """

    tools: Sequence[ToolSchema] = ()

    def reset(
        self, row: Mapping[str, Any]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Begin the episode of `row`, the prompt's columns, whatever state the last one left.

        Returns messages that follow those of the prompt, if there are any.
        """
        ...

    def step(self, turn: ModelTurn) -> Step | Awaitable[Step]:
        """Answer a turn of the model. Its calls are of tools among `tools`, with JSON objects as
        arguments; others were answered already, and are left out.
        """
        ...

    def reward(
        self,
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float] | None] | None:
        """The reward of the episode, asked once at its end, beside that of its steps.

        A mapping holds named parts, whose sum it is. None leaves it to the reward function.
        """
        return None

    def state(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """The state at the end of the episode, JSON-able: for people, in completions.jsonl, and for
        the reward function as its column `environment_state`.
        """
        return {}

    def close(self) -> Awaitable[None] | None:
        """Release what the instance holds. It is called once, and nothing else after it."""
        return None
