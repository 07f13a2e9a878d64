"""AgentRollouts: base class for environments that run their own loop and request chat completions.

VerifiersEnvironment and VerifiersV1Environment are subclasses. `trainer_hooks.train.task` loads a
subclass by its import path. A producer calls the object for each sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import Self

from rollout.errors import ConfigError
from trainer_hooks.environments.chat_session import ChatSession
from trainer_hooks.environments.faults import EnvironmentFault, FaultCounter, in_time
from trainer_hooks.producer.groups import RolloutLLM
from trainer_hooks.prompts.ledger import PromptItem
from trainer_hooks.rewards.calling import RewardFunction
from trainer_hooks.rollouts import Rollout


class AgentRollouts(ABC):
    """A rollout_fn whose subclass runs the environment in `run`.

    A fault fails only its rollout, whose `failure` is the kind of fault and whose state has the
    error. The object is also an async context manager for resources that rollouts share.

    `reward_fn`: scores the samples of a prompt together, or None if each rollout has its own
        reward.
    """

    reward_fn: RewardFunction | None = None

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        *,
        template_options: Mapping[str, Any] | None = None,
        rollout_timeout_s: float | None = None,
        max_first_failures: int = 64,
    ) -> None:
        """Prepare for rollouts. Raises ConfigError for a timeout that is not above 0.

        `name`: the environment's name, for messages.
        `tokenizer`: a transformers tokenizer with a chat template.
        `rollout_timeout_s`: seconds for a rollout and its own score, or None for no limit.
        `max_first_failures`: number of failed rollouts that ends the run if none has succeeded.
        """
        if rollout_timeout_s is not None and rollout_timeout_s <= 0:
            raise ConfigError(f"rollout_timeout_s={rollout_timeout_s} must be above 0, or null")
        self._name, self._tokenizer = name, tokenizer
        self._template_options = dict(template_options or {})
        self._timeout_s = rollout_timeout_s
        self._faults = FaultCounter(name, max_first_failures)

    @classmethod
    @abstractmethod
    def load(
        cls, name: str, tokenizer: Any, args: Mapping[str, Any] | None = None, **options: Any
    ) -> Self:
        """Return the environment `name` of an installed package. `options` are arguments of the
        class."""

    @abstractmethod
    def prompts(self) -> Sequence[PromptItem]:
        """Return the prompts to train on. `run` gets the columns of a prompt."""

    @abstractmethod
    async def run(self, session: ChatSession, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Run the environment on the row `columns` to its end. Return the fields of its Rollout.
        Raises EnvironmentFault for a fault of a known kind."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:  # noqa: B027 - most share nothing
        """Release resources that rollouts share. A second call does nothing."""

    async def __call__(self, llm: RolloutLLM, prompt: Any) -> Rollout:
        """Return the rollout of one sample.

        Raises errors of the llm, ConfigErrors of `run` and of chat requests with unsupported
        settings. Raises EnvironmentFailed if `max_first_failures` rollouts failed and none
        succeeded.
        """
        session = ChatSession(llm, self._tokenizer, self._template_options)
        try:
            fields = await in_time(self.run(session, llm.columns), self._timeout_s)
        except EnvironmentFault as error:
            return self._failed(session, error)
        except ConfigError:
            raise
        except Exception as error:  # an environment may raise anything
            fault = EnvironmentFault("environment_error", repr(error))
            fault.__cause__ = error
            return self._failed(session, fault)
        if session.fault is not None:  # the environment ignored the error
            raise session.fault
        rollout = session.rollout(**fields)
        if rollout.succeeded():
            self._faults.add_success()
        return rollout

    def _failed(self, session: ChatSession, fault: EnvironmentFault) -> Rollout:
        if session.fault is not None:
            raise session.fault from fault.__cause__ or fault
        self._faults.add(fault)
        return session.rollout(failure=fault.kind, state={"end": "failure", "error": str(fault)})
