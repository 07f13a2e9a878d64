"""Environments of the package verifiers from its version 0.4 on, as prompts and a rollout_fn.

    async with VerifiersV1Environment.load("gsm8k-v1", tokenizer, args) as environment:
        producer = AsyncRolloutProducer(
            llm, environment.prompts(), None, ..., rollout_fn=environment
        )

Used by users, and by training jobs that name it as `environment.path`. The environment listens on a
TCP port of 127.0.0.1.
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
    """A rollout_fn that runs an unmodified `verifiers.v1.Env` with one agent.

    Enter it as an async context manager before the first rollout. The agent's program requests chat
    completions over HTTP. A Rollout has the exact tokens of the requests, and the weighted sum of
    rewards as its reward. Reward terms are the scores of rewards and metrics. The Rollout's state
    contains the trace's `info`.
    """

    def __init__(self, environment: Any, tokenizer: Any, **options: Any) -> None:
        """Wrap a verifiers.v1.Env. `options` are arguments of AgentRollouts. Raises ConfigError for
        several agents and for an infinite taskset."""
        from verifiers.v1.configs.agent import agent_config_fields

        super().__init__(environment.config.env_id, tokenizer, **options)
        if len(agents := list(agent_config_fields(environment.config))) != 1:
            raise ConfigError(
                f"{self._name} has the agents {agents}; only one agent can be trained"
            )
        if not environment.taskset.bounded:
            raise ConfigError(f"the taskset of {self._name} is infinite; choose a finite one")
        self.environment = environment
        self._tasks = list(environment.taskset)
        self._endpoint = ChatEndpoint()
        self._stack = AsyncExitStack()

    @classmethod
    def load(
        cls, name: str, tokenizer: Any, args: Mapping[str, Any] | None = None, **options: Any
    ) -> VerifiersV1Environment:
        """Return the environment over the taskset `name`.

        `args` is its configuration, such as
        {"taskset": ..., "agent": {"harness": ..., "runtime": ...}}. Raises ConfigError if
        verifiers.v1 or the taskset is missing, and for unknown fields.
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
        """Return a prompt for each task, with the task's text or name."""
        # The texts are for people. The agent's program creates the messages.
        texts = [task.data.prompt_text or task.data.name or task.key for task in self._tasks]
        return [PromptItem(text, {_INDEX: index}) for index, text in enumerate(texts)]

    async def __aenter__(self) -> VerifiersV1Environment:
        """Start the HTTP endpoint and the environment's shared tools in this event loop."""
        await self._stack.enter_async_context(self._endpoint)
        await self._stack.enter_async_context(self.environment.serving())
        return self

    async def aclose(self) -> None:
        """Stop serving. A second call does nothing."""
        await self._stack.aclose()

    async def run(self, session: ChatSession, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Run one episode of the row's task and return the fields of its Rollout. Raises
        EnvironmentFault for a failed episode, and ConfigError if the agent ran several times."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        with self._endpoint.serving(session) as url:
            # The endpoint needs no key, so no environment variable has this name.
            client = EvalClientConfig(base_url=url, api_key_var="ROLLOUT_NO_API_KEY")
            episode = await self.environment.run_episode(
                self._tasks[columns[_INDEX]],
                ModelContext(model=_MODEL, client=client),
                on_discard=lambda _: session.clear(),  # the agent is run again
            )
        if not episode.ok:
            # The agent's errors come before the environment's reaction to them.
            errors = [error for each in (*episode.traces, episode) for error in each.errors]
            kind = errors[0].type if errors else "not_ok"
            raise EnvironmentFault(kind, "; ".join(error.message for error in errors))
        if len(episode.traces) != 1:
            raise ConfigError(
                f"{self._name} ran its agent {len(episode.traces)} times in one episode, and each "
                "run has a separate reward; choose an environment that runs it once"
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
