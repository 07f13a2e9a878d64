"""The environment of a job, made from its settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.errors import ConfigError
from trainer_hooks.environments import EnvironmentRollouts, EpisodeLimits
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.jobs.import_paths import import_object


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """What the model acts on; nothing where `path` is None.

    `path`: "package.module:name" of an Environment's class, or of a function that makes one, called
    with `options`; or of an AgentRollouts, whose `load` gets them. `max_turns`, `step_timeout_s`,
    `rollout_timeout_s`: see EpisodeLimits; environments of AgentRollouts have turns of their own.
    `max_total_tokens`: of a prompt and its turn; None takes engine.max_sequence_length.
    `max_environments`: how many are in use at a time.
    """

    path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 16
    max_total_tokens: int | None = None
    step_timeout_s: float | None = 60.0
    rollout_timeout_s: float | None = None
    max_environments: int = 256

    @staticmethod
    def overrides_of(path: str) -> list[str]:
        """The Hydra overrides that environment=package.module:Class stands for."""
        return ["environment=python", f"++environment.path={path}"]

    def limits(self, max_sequence_length: int | None) -> EpisodeLimits:
        """The limits of an episode on an engine with sequences of that length.

        Raises ConfigError for numbers out of range.
        """
        return EpisodeLimits(
            max_turns=self.max_turns,
            max_total_tokens=self.max_total_tokens or max_sequence_length,
            step_timeout_s=self.step_timeout_s,
            rollout_timeout_s=self.rollout_timeout_s,
        )


def environment_rollouts(
    settings: EnvironmentSettings,
    tokenizer: Any,
    template_options: Mapping[str, Any],
    max_sequence_length: int | None,
) -> EnvironmentRollouts | AgentRollouts | None:
    """The rollout_fn of the settings; None where they name no environment.

    Raises ConfigError for a path that names none, options that it does not take, and a tokenizer
    without a chat template.
    """
    if settings.path is None:
        return None
    make, options = import_object(settings.path, "environment.path"), dict(settings.options)
    is_agent = inspect.isclass(make) and issubclass(make, AgentRollouts)
    if is_agent:
        own = {
            "template_options": template_options,
            "rollout_timeout_s": settings.rollout_timeout_s,
        }
        make, options = make.load, {**options, **own, "tokenizer": tokenizer}
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        given = dict(settings.options)
        raise ConfigError(f"environment.options={given}: {settings.path}: {error}") from error
    if is_agent:
        agent: AgentRollouts = make(**options)
        return agent
    return EnvironmentRollouts(
        functools.partial(make, **options) if options else make,
        tokenizer,
        settings.limits(max_sequence_length),
        max_environments=settings.max_environments,
        template_options=template_options,
    )
