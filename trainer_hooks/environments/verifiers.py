"""Environments of the package `verifiers` before its version 0.4, as prompts and a rollout_fn.

    environment = VerifiersEnvironment.load("reverse-text", tokenizer)
    producer = AsyncRolloutProducer(
        llm, environment.prompts(), environment.reward_fn, ..., rollout_fn=environment
    )

Used by users, and by training jobs that name it as `environment.path`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollout.errors import ConfigError
from rollout.text import RenderedText
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.environments.chat_session import ChatSession, ContextTooLongError
from trainer_hooks.environments.faults import EnvironmentFault
from trainer_hooks.prompts.ledger import PromptItem
from trainer_hooks.rewards.adapters import WeightedReward

_MODEL = "policy"
_STATE = "verifiers_state"
# An empty answer is no fault, because the environment scores it.
_EMPTY_ANSWER = "EmptyModelResponseError"
# Keys of the state whose values repeat the prompt's columns, the tokens or the reward.
_KNOWN_KEYS = (
    *("input", "task", "client", "model", "sampling_args", "prompt", "completion", "trajectory"),
    *("trajectory_id", "tool_defs", "timing", "usage", "reward", "advantage", "metrics"),
    *("is_completed", "is_truncated", "stop_condition", "final_env_response"),
)


class VerifiersEnvironment(AgentRollouts):
    """A rollout_fn that runs an unmodified `verifiers.Environment` in this process.

    A rollout has the exact tokens of its requests, the rubric's reward, and the JSON-able part of
    the environment's state. Reward terms are the unweighted results of the rubric's functions.
    A fault of the environment fails only its rollout. Errors of the llm are raised.

    `reward_fn`: scores the samples of a prompt together if the rubric has group functions.
        Otherwise it is None, and `run` scores each rollout.
    """

    def __init__(self, environment: Any, tokenizer: Any, **options: Any) -> None:
        """Wrap a verifiers.Environment. `options` are arguments of AgentRollouts. Raises
        ConfigError if verifiers is missing."""
        super().__init__(environment.env_id or type(environment).__name__, tokenizer, **options)
        self.environment, self._client_class = environment, _client_class()
        self.reward_fn = self._score_group if environment.requires_group_rollouts else None

    @classmethod
    def load(
        cls, name: str, tokenizer: Any, args: Mapping[str, Any] | None = None, **options: Any
    ) -> VerifiersEnvironment:
        """Return the environment that the installed package `name` creates from `args`.

        Raises ConfigError if verifiers or the package is missing, for arguments that the package
        refuses, and outside the main thread.
        """
        load_environment = _import_verifiers().load_environment
        with _own_signal_handlers():
            try:
                environment = load_environment(name, **(args or {}))
            except (ValueError, RuntimeError, AttributeError) as error:
                raise ConfigError(f"the environment {name!r} cannot be loaded: {error}") from error
        return cls(environment, tokenizer, **options)

    def prompts(self) -> VerifiersPrompts:
        return VerifiersPrompts(self.environment.get_dataset(), self._as_text)

    def held_out(self) -> VerifiersPrompts:
        """Return the rows for evaluation, or the rows to train on if there are none."""
        return VerifiersPrompts(self.environment.get_eval_dataset(), self._as_text)

    async def run(self, session: ChatSession, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Run one rollout of the environment and return the fields of its Rollout. The reward is
        included unless `reward_fn` is set. Raises EnvironmentFault."""
        rubric = self.environment.rubric
        rest = dict(columns)
        example = {"prompt": rest.pop("messages"), **rest}
        state = await self.environment.rollout(example, self._client_class(session), _MODEL, {})
        error = state["error"]
        if error is not None and type(error).__name__ != _EMPTY_ANSWER:
            await rubric.cleanup(state)
            raise EnvironmentFault(type(error).__name__, repr(error)) from error
        fields: dict[str, Any] = {"is_truncated": bool(state["is_truncated"])}
        if self.reward_fn is not None:
            fields["columns"] = {_STATE: state}
        else:
            try:
                await rubric.score_rollout(state)
            finally:
                await rubric.cleanup(state)
            fields |= {"reward": state["reward"], "reward_terms": state["metrics"]}
        summary = {"end": state["stop_condition"], "num_turns": len(state["trajectory"])}
        return fields | {"state": summary | {"environment": _json_part(state)}}

    async def _score_group(
        self, completions: Sequence[Any], verifiers_state: Sequence[Any]
    ) -> list[float]:
        """Return the rubric's rewards of a prompt's samples, each with its functions as terms."""
        rubric = self.environment.rubric
        try:
            await rubric.score_group(list(verifiers_state))
        finally:
            for state in verifiers_state:
                await rubric.cleanup(state)
        return [WeightedReward(state["reward"], state["metrics"]) for state in verifiers_state]

    def _as_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        tools = [
            {"type": "function", "function": {"name": each.name, "parameters": each.parameters}}
            for each in self.environment.tool_defs or ()
        ]
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=True,
            **self._template_options,
        )
        return text


class VerifiersPrompts(Sequence[PromptItem]):
    """The rows of a verifiers dataset. The prompt's messages become the column `messages`."""

    def __init__(self, dataset: Any, as_text: Callable[[Any], str]) -> None:
        """Wrap a dataset from `Environment.get_dataset`. `as_text` renders a prompt's messages."""
        self._dataset, self._as_text = dataset, as_text

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return one row as a PromptItem, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        columns = dict(self._dataset[int(index)])
        messages = columns.pop("prompt")
        if isinstance(messages, str):
            raise ConfigError(
                f"row {index} of the environment has a text prompt; chat messages are needed"
            )
        prompt = RenderedText(self._as_text(messages))
        return PromptItem(prompt, columns | {"messages": messages})


def _json_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment's own part of its state, without values that JSON cannot express."""
    part = {}
    for name, value in state.items():
        if name in _KNOWN_KEYS or value is None:
            continue
        with contextlib.suppress(TypeError, ValueError):
            part[name] = json.loads(json.dumps(value))
    return part


def _import_verifiers() -> Any:
    """Return the package verifiers. Raises ConfigError if it is missing or too new."""
    try:
        import verifiers

        _ = verifiers.Environment
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "environments of verifiers need its classes from before version 0.4: "
            "pip install 'verifiers>=0.3,<0.4'"
        ) from error
    return verifiers


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Restore this process's signal handlers after the block, in which verifiers replaces them.
    Raises ConfigError outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("verifiers makes environments in the main thread only")
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


@functools.cache
def _client_class() -> Any:
    """Return a client class of verifiers whose requests a ChatSession answers."""
    _import_verifiers()  # the base class is in an optional package
    from openai.types.chat import ChatCompletion
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.errors import OverlongPromptError

    class SessionClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
        """A client of verifiers whose `client` is a ChatSession."""

        async def get_native_response(
            self,
            prompt: Any,
            model: str,
            sampling_args: Mapping[str, Any],
            tools: Any = None,
            **_: Any,
        ) -> Any:
            body = {"model": model, "messages": prompt, "tools": tools, **(sampling_args or {})}
            try:
                return ChatCompletion.model_validate(await self.client.complete(body))
            except ContextTooLongError as error:
                raise OverlongPromptError(str(error)) from error

        async def close(self) -> None:
            """Do nothing: a session has no connection."""

    return SessionClient
