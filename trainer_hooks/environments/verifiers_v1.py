"""Environments of `verifiers.v1`, all that there is since version 0.4, as prompts and a rollout_fn.

async with VerifiersV1Environment.load("gsm8k-v1", tokenizer, args) as environment:
    producer = AsyncRolloutProducer(
        llm, environment.prompts(), None, ..., rollout_fn=environment
    )
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.environments.chat_endpoint import ChatEndpoint
from trainer_hooks.environments.chat_session import ChatSession
from trainer_hooks.environments.faults import EnvironmentFault
from trainer_hooks.prompts.ledger import PromptItem

_MODEL = "policy"
_INDEX = "task_index"


class VerifiersV1Environment(AgentRollouts):
    """A `verifiers.v1.Env` of one agent, unmodified; a rollout_fn, and a context that serves it.

    The agent's program asks for chat completions over HTTP, as it would of any endpoint. Its
    rollouts have the exact tokens, the sum of the weighted rewards, the scores of rewards and
    metrics as terms, and the trace's `info` as state.
    """

    def __init__(self, environment: Any, tokenizer: Any, **options: Any) -> None:
        """`environment`: of verifiers.v1. `options`: of AgentRollouts.

        Raises ConfigError for several agents, whose traces have rewards of their own, and for a
        taskset without end.
        """
        from verifiers.v1.configs.agent import agent_config_fields

        super().__init__(environment.config.env_id, tokenizer, **options)
        if len(agents := list(agent_config_fields(environment.config))) != 1:
            raise ConfigError(f"{self._name} has the agents {agents}; one agent can be trained")
        if not environment.taskset.bounded:
            raise ConfigError(f"the taskset of {self._name} is infinite; a finite one is wanted")
        self.environment = environment
        self._tasks = list(environment.taskset)
        self._endpoint = ChatEndpoint()
        self._stack = AsyncExitStack()

    @classmethod
    def load(
        cls, name: str, tokenizer: Any, args: Mapping[str, Any] | None = None, **options: Any
    ) -> VerifiersV1Environment:
        """The environment over the taskset `name`. `args`: its configuration, as
        {"taskset": ..., "agent": {"harness": ..., "runtime": ...}}.

        Raises ConfigError without verifiers.v1, without the taskset, and for other fields.
        """
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            raise ConfigError(
                "environments of verifiers.v1 need the package: pip install 'verifiers>=0.4'"
            ) from error
        data = dict(args or {})
        data["taskset"] = {**data.get("taskset", {}), "id": name}
        try:
            environment = load_environment(resolve_env_config(data))
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"the environment {name!r} cannot be loaded: {error}") from error
        return cls(environment, tokenizer, **options)

    def prompts(self) -> list[PromptItem]:
        """A prompt for each task, as its text or else its name, for people: the agent's program
        makes the messages.
        """
        texts = [task.data.prompt_text or task.data.name or task.key for task in self._tasks]
        return [PromptItem(text, {_INDEX: index}) for index, text in enumerate(texts)]

    async def __aenter__(self) -> VerifiersV1Environment:
        """Serve the environment's shared tools, and the agents, in this event loop."""
        await self._stack.enter_async_context(self._endpoint)
        await self._stack.enter_async_context(self.environment.serving())
        return self

    async def aclose(self) -> None:
        """Stop serving. Twice is fine."""
        await self._stack.aclose()

    async def run(self, session: ChatSession, columns: Mapping[str, Any]) -> dict[str, Any]:
        """One episode of the row's task."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        with self._endpoint.serving(session) as url:
            # A name that no variable has: the endpoint asks for no key, and is told none.
            client = EvalClientConfig(base_url=url, api_key_var="ROLLOUT_NO_API_KEY")
            episode = await self.environment.run_episode(
                self._tasks[columns[_INDEX]],
                ModelContext(model=_MODEL, client=client),
                on_discard=lambda _: session.clear(),  # an agent that is run again
            )
        if not episode.ok:
            # What the agent ran into comes before what the environment made of it.
            errors = [error for each in (*episode.traces, episode) for error in each.errors]
            kind = errors[0].type if errors else "not_ok"
            raise EnvironmentFault(kind, "; ".join(error.message for error in errors))
        if len(episode.traces) != 1:
            raise ConfigError(
                f"{self._name} ran its agent {len(episode.traces)} times in one episode, and each "
                "run has a reward of its own; environments that run it once can be trained on"
            )
        (trace,) = episode.traces
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        own = json.loads(json.dumps(trace.info, default=str))
        return {
            "reward": trace.reward,
            "reward_terms": metrics | scores,
            "state": {
                "end": trace.stop_condition,
                "num_turns": trace.num_turns,
                "environment": own,
            },
            "is_truncated": trace.is_truncated,
        }
