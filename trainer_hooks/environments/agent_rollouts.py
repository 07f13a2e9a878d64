"""AgentRollouts: rollouts of environments that run their own loop and ask for chat completions.

Base class of VerifiersEnvironment and VerifiersV1Environment. Used by `trainer_hooks.train.task`,
which loads a subclass by its import path; a producer calls the object for each sample.
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

    A fault fails its rollout alone: `failure` is the kind of fault, and the state has the error.
    The object is also an async context for resources that rollouts share.
    `reward_fn`: scores the samples of a prompt together; None if each rollout has its own reward.
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
        """`name`: the environment's, for messages. `tokenizer`: one of transformers with a chat
        template. `rollout_timeout_s`: limit on a rollout and its own score; None sets no limit.
        `max_first_failures`: number of failed rollouts without any success that ends the run.

        Raises ConfigError for a timeout that is not above 0.
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
        """Return the environment `name` of an installed package. `options`: of the class itself."""

    @abstractmethod
    def prompts(self) -> Sequence[PromptItem]:
        """Return the prompts to train on. The columns of a prompt go to `run`."""

    @abstractmethod
    async def run(self, session: ChatSession, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Run the environment on the row `columns` to its end. Returns the fields of its Rollout.

        Raises EnvironmentFault for a fault of a known kind.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:  # noqa: B027 - most share nothing
        """Release resources that rollouts share. May be called twice."""

    async def __call__(self, llm: RolloutLLM, prompt: Any) -> Rollout:
        """Return the rollout of one sample.

        Raises errors of the llm, ConfigErrors of `run` and of chat requests with unsupported
        settings, and EnvironmentFailed if `max_first_failures` rollouts failed and none succeeded.
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
