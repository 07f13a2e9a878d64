"""AgentRollouts: rollouts of environments that run a loop of their own and ask for completions."""

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
    """A rollout_fn; what runs the environment is `run` of a subclass.

    A fault makes a failed rollout, whose `failure` says of which kind and whose state has the
    error; the other rollouts of the group do not notice. It is also an async context, which holds
    what the environment shares between rollouts. `reward_fn`: scores the samples of a prompt
    together; None where each rollout has a reward of its own.
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
        """`name`: of the environment, for messages. `tokenizer`: one of transformers with a chat
        template. `rollout_timeout_s`: for a rollout and its own score. `max_first_failures`: if
        this many rollouts fail before any has succeeded, the environment itself is at fault.
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
        """The environment of an installed package, made with `args`; `options` are the class's."""

    @abstractmethod
    def prompts(self) -> Sequence[PromptItem]:
        """The rows to train on; `run` gets the columns of one."""

    @abstractmethod
    async def run(self, session: ChatSession, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Run the environment on the row `columns` to its end: the fields of its Rollout.

        Raises EnvironmentFault for a fault of a known kind.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:  # noqa: B027 - most share nothing
        """Release what is shared between rollouts. Twice is fine."""

    async def __call__(self, llm: RolloutLLM, prompt: Any) -> Rollout:
        """One sample. Raises what the llm raises, ConfigError of `run` and for what the environment
        asks and no turn of the policy can be, EnvironmentFailed where no rollout has succeeded.
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
        if session.fault is not None:  # the environment went on without the turn
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
