"""The environment of a job, made from its settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollout.errors import ConfigError
from rollout.ranges import Name, Options, PositiveInt, PositiveSeconds, check_fields
from trainer_hooks.environments import EnvironmentRollouts, EpisodeLimits
from trainer_hooks.environments.agent_rollouts import AgentRollouts
from trainer_hooks.train.import_paths import import_object

# Limits of the episodes that EnvironmentRollouts runs; AgentRollouts run a loop of their own.
_OF_EPISODES = ("max_turns", "max_total_tokens", "step_timeout_s", "max_environments")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """What the model acts on; nothing where `path` is None.

    `path`: "package.module:name" of an Environment's class, or of a function that makes one, called
    with `options`; or of an AgentRollouts, whose `load` gets them. `max_turns`, `step_timeout_s`,
    `rollout_timeout_s`: see EpisodeLimits. `max_total_tokens`: of a prompt and its turn; None takes
    engine.max_sequence_length. `max_environments`: how many are in use at a time.
    An AgentRollouts has `rollout_timeout_s` alone; other values of the other limits are refused.
    """

    path: Name | None = None
    options: Options = field(default_factory=dict)
    max_turns: PositiveInt = 16
    max_total_tokens: PositiveInt | None = None
    step_timeout_s: PositiveSeconds | None = 60.0
    rollout_timeout_s: PositiveSeconds | None = None
    max_environments: PositiveInt = 256

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    @staticmethod
    def overrides_of(path: str) -> list[str]:
        """The Hydra overrides that environment=package.module:Class stands for."""
        return ["environment=python", f"++environment.path={path}"]

    def limits(self, max_sequence_length: int | None) -> EpisodeLimits:
        """The limits of an episode on an engine with sequences of that length."""
        max_total_tokens = self.max_total_tokens
        return EpisodeLimits(
            max_turns=self.max_turns,
            max_total_tokens=max_sequence_length if max_total_tokens is None else max_total_tokens,
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

    Raises ConfigError for a path that names none, options and limits that it does not take, and a
    tokenizer without a chat template.
    """
    if settings.path is None:
        return None
    make, options = import_object(settings.path, "environment.path"), dict(settings.options)
    is_agent = inspect.isclass(make) and issubclass(make, AgentRollouts)
    if is_agent:
        _refuse_limits_of_episodes(settings)
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


def _refuse_limits_of_episodes(settings: EnvironmentSettings) -> None:
    """Raise ConfigError for a limit that an AgentRollouts would ignore."""
    for limit in fields(settings):
        value = getattr(settings, limit.name)
        if limit.name in _OF_EPISODES and value != limit.default:
            raise ConfigError(
                f"environment.{limit.name}={value} is not a limit of {settings.path}, which runs "
                "its episodes itself; leave it out, or set a limit of its own in "
                "environment.options"
            )
