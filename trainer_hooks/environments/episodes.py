"""EnvironmentRollouts: a rollout_fn that runs one episode of an environment for each sample.

Users and `trainer_hooks.train.task` make it. AsyncRolloutProducer and `trainer_hooks.evaluation`
call it for each sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rollout.errors import ConfigError
from rollout.ranges import PositiveInt, PositiveSeconds, check_fields
from rollout.tool_calls import ToolCall, tool_names
from trainer_hooks.environments.conversation import Conversation
from trainer_hooks.environments.faults import EnvironmentFault, FaultCounter, in_time
from trainer_hooks.environments.pool import EnvironmentPool, HostedEnvironment, MakeEnvironment
from trainer_hooks.environments.protocol import (
    Message,
    ModelTurn,
    Step,
    ToolCallError,
    ToolSchema,
)
from trainer_hooks.producer.groups import RolloutLLM
from trainer_hooks.rollouts import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode.

    `max_turns`: most turns of the model.
    `max_total_tokens`: most tokens of one prompt and its turn. None leaves the limit to the engine,
        where a longer request fails.
    `step_timeout_s`: seconds for each call of the environment. None sets no limit.
    `rollout_timeout_s`: seconds for the whole rollout, including pauses of the engines. None sets
        no limit.
    """

    max_turns: PositiveInt = 16
    max_total_tokens: PositiveInt | None = None
    step_timeout_s: PositiveSeconds | None = 60.0
    rollout_timeout_s: PositiveSeconds | None = None

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


class EnvironmentRollouts:
    """A `rollout_fn` that runs one episode of an environment for each sample.

        async with EnvironmentRollouts(Store, tokenizer) as rollout_fn:
            async with AsyncRolloutProducer(llm, prompts, None, 8, 16, 1, rollout_fn) as producer:

    `make` is the environment's class, or another function that returns instances and can be async.
    The first messages are the column `messages` of the prompt's row, or the prompt's text as a user
    message.

    A call of an unknown tool, or with malformed arguments, is no fault. The model reads an error as
    the tool's answer. A fault is an environment that raises, hangs or is closed, or a request that
    fails. It fails only its rollout, whose `failure` is the kind of fault. A cancelled rollout
    aborts its request and releases its environment.

    The `state` of a rollout has "end" (done, length, max_turns, max_total_tokens or failure),
    "num_turns", "num_tool_calls" and "num_bad_tool_calls". The environment's own state is in
    "environment", or a fault's message in "error".
    """

    def __init__(
        self,
        make: MakeEnvironment,
        tokenizer: Any,
        limits: EpisodeLimits = EpisodeLimits(),
        *,
        max_environments: int = 256,
        template_options: Mapping[str, Any] | None = None,
        max_first_failures: int = 64,
    ) -> None:
        """Make a pool of environments, empty at first.

        `tokenizer`: a transformers tokenizer with a chat template.
        `max_environments`: most instances in use at a time.
        `template_options`: arguments of the chat template.
        `max_first_failures`: number of failed rollouts that ends the run if none has succeeded.

        Raises ConfigError for numbers out of range and for a tokenizer without a chat template.
        """
        self._tokenizer, self._options, self._limits = tokenizer, template_options, limits
        self._converse(())  # raises without a chat template
        self._pool = EnvironmentPool(make, max_environments)
        self._faults = FaultCounter(str(getattr(make, "__name__", make)), max_first_failures)

    async def __call__(self, llm: RolloutLLM, prompt: Any) -> Rollout:
        """Return the rollout of one sample.

        Raises errors of generation, ConfigErrors of the environment, and EnvironmentFailed if
        `max_first_failures` rollouts failed and none succeeded.
        """
        try:
            environment = await self._pool.acquire()
        except EnvironmentFault as fault:
            return Rollout([], failure=fault.kind, state={"end": "failure", "error": str(fault)})
        try:
            messages = first_messages(llm.columns, prompt)
            episode = Episode(environment, llm, messages, self._limits, self._converse)
            try:
                row = {**llm.columns, "prompt": llm.item.prompt}
                await in_time(episode.run(row), self._limits.rollout_timeout_s)
                self._faults.add_success()
            except EnvironmentFault as fault:
                self._faults.add(fault)
                episode.fault = fault
            return episode.rollout()
        finally:
            self._pool.release(environment)

    def _converse(self, tools: Sequence[ToolSchema]) -> Conversation:
        return Conversation(self._tokenizer, tools, self._options)

    async def aclose(self, timeout_s: float = 10.0) -> None:
        """Close all environments. An environment in use is closed when its rollout ends. A second
        call does nothing."""
        await self._pool.aclose(timeout_s)

    async def __aenter__(self) -> EnvironmentRollouts:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


def first_messages(columns: Mapping[str, Any], prompt: Any) -> list[Message]:
    """Return the first messages of an episode. Raises ConfigError for a prompt of token ids."""
    if messages := columns.get("messages"):
        return list(messages)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    raise ConfigError(
        "an environment needs prompts as chat messages (a column `messages`) or as text; this "
        f"prompt is {type(prompt).__name__}"
    )


class Episode:
    """One rollout in an environment: its messages, rewards, counts of tool calls, and its end."""

    def __init__(
        self,
        environment: HostedEnvironment,
        llm: RolloutLLM,
        messages: list[Message],
        limits: EpisodeLimits,
        converse: Callable[[Sequence[ToolSchema]], Conversation],
    ) -> None:
        """Start without turns. `converse` returns a Conversation with the given tools."""
        self._environment, self._llm, self._limits = environment, llm, limits
        self._messages = messages
        self._converse, self._conversation = converse, converse(())
        self._reward: float | None = None
        self._terms: dict[str, float] = {}
        self._state: Any = {}
        self._num_tool_calls = self._num_bad_tool_calls = 0
        self._end = "max_turns"
        self.fault: EnvironmentFault | None = None

    async def run(self, row: Mapping[str, Any]) -> None:
        """Run the whole episode. Raises EnvironmentFault, ConfigError and errors of generation."""
        self._messages += _messages_of("reset", await self._call("reset", row) or ())
        tools = self._environment.tools
        self._conversation = self._converse(tools)
        for _ in range(self._limits.max_turns):
            turn = await self._next_turn()
            if turn is None:
                break
            self._messages.append(turn.message)
            step = await self._answer(turn, tool_names(tools))
            self._messages += step.messages
            self._add_reward("step", step.reward)
            if step.is_done:
                self._end = "done"
                break
        await self._finish()

    async def _call(self, name: str, *args: Any) -> Any:
        return await self._environment.call(name, *args, timeout_s=self._limits.step_timeout_s)

    async def _next_turn(self) -> ModelTurn | None:
        """Return the model's next turn, or None if a limit of tokens cut it or left no room."""
        ids = self._conversation.prompt(self._messages)
        limit, changes = self._limits.max_total_tokens, {}
        if limit is not None:
            room, wanted = limit - len(ids), self._llm.sampling_params.num_tokens_to_generate
            if room < 1:
                self._end = "max_total_tokens"
                if not self._conversation.requests:
                    raise EnvironmentFault(
                        "prompt_too_long",
                        f"the first prompt has {len(ids)} tokens, max_total_tokens={limit}",
                    )
                return None
            if wanted is None or wanted > room:
                changes = {"num_tokens_to_generate": room}
        request = await self._llm.generate(ids, **changes)
        turn = self._conversation.add(request)
        if not request.succeeded():
            raise EnvironmentFault(
                "request_failed", f"turn {len(self._conversation.requests)} did not succeed"
            )
        if request.finish_reason == "length":
            self._end = "length"
            return None
        return turn

    async def _answer(self, turn: ModelTurn, names: Sequence[str]) -> Step:
        """Return the environment's answer to a turn, with an error for each bad tool call."""
        errors = [_call_error(call, names) for call in turn.tool_calls]
        good = [call for call, e in zip(turn.tool_calls, errors, strict=True) if e is None]
        self._num_tool_calls += len(turn.tool_calls) + len(turn.malformed_calls)
        refusals = [
            _tool_message(e, call) for call, e in zip(turn.tool_calls, errors, strict=True) if e
        ]
        refusals += [_tool_message(f"error: {t} is not a tool call") for t in turn.malformed_calls]
        self._num_bad_tool_calls += len(refusals)
        if refusals and not good:
            return Step(messages=refusals)
        try:
            step = await self._call("step", replace(turn, tool_calls=good))
        except ToolCallError as error:
            self._num_bad_tool_calls += 1
            return Step(messages=[_tool_message(f"error: {error}", *good[:1]), *refusals])
        if not isinstance(step, Step):
            raise EnvironmentFault("step_error", f"step() returned {step!r}, which is not a Step")
        self._num_bad_tool_calls += step.num_bad_tool_calls
        return replace(step, messages=[*_messages_of("step", step.messages), *refusals])

    def _add_reward(self, name: str, reward: Any) -> None:
        """Add the reward that method `name` returned: a number, named parts, or None. Raises
        EnvironmentFault for other values."""
        try:
            if isinstance(reward, Mapping):
                self._terms = {str(term): float(value) for term, value in reward.items()}
                reward = sum(self._terms.values())
            if reward is not None:
                self._reward = (self._reward or 0.0) + float(reward)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(
                f"{name}_error", f"{name}() gave {reward!r} as reward"
            ) from error

    async def _finish(self) -> None:
        """Ask the environment for the episode's reward and state. Raises EnvironmentFault."""
        reward, state = await self._call("reward"), await self._call("state")
        self._add_reward("reward", reward)
        try:
            self._state = msgspec.to_builtins(state or {}, str_keys=True)
        except (TypeError, ValueError) as error:
            raise EnvironmentFault("state_error", f"state() is not JSON-able: {error}") from error

    def rollout(self) -> Rollout:
        """Return the episode as a Rollout, which has failed if `fault` is set."""
        state = {
            "end": "failure" if self.fault else self._end,
            "num_turns": len(self._conversation.requests),
            "num_tool_calls": self._num_tool_calls,
            "num_bad_tool_calls": self._num_bad_tool_calls,
        }
        if self.fault is not None:
            error = {"error": str(self.fault)}
            return self._conversation.rollout(failure=self.fault.kind, state=state | error)
        return self._conversation.rollout(
            reward=self._reward,
            reward_terms=self._terms,
            state={**state, "environment": self._state},
            columns={"environment_state": self._state},
            is_truncated=self._end in ("max_turns", "max_total_tokens"),
        )


def _messages_of(name: str, messages: Any) -> Sequence[Message]:
    """Return the messages that method `name` returned. Raises EnvironmentFault for other values."""
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise EnvironmentFault(
            f"{name}_error", f"{name}() returned {messages!r}, which is not a sequence of messages"
        )
    return messages


def _call_error(call: ToolCall, names: Sequence[str]) -> str | None:
    """Return the error that the model reads for a bad call, or None for a good call."""
    if call.name not in names:
        return f"error: there is no tool {call.name!r}; the tools are: {', '.join(names) or 'none'}"
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        return f"error: the arguments of {call.name} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"error: the arguments of {call.name} must be a JSON object"
    return None


def _tool_message(content: str, call: ToolCall | None = None) -> Message:
    message = {"role": "tool", "content": content}
    return message if call is None else {**message, "name": call.name, "tool_call_id": call.id}
