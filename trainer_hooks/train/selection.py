"""What the settings of a job name by import path: group filters, curriculum, launcher."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rollout.errors import ConfigError
from rollout.launch.launcher import Launcher
from trainer_hooks.prompts.curriculum import Curriculum
from trainer_hooks.train.import_paths import import_function, import_object
from trainer_hooks.train.settings import CurriculumSettings, FunctionSettings, ProducerSettings

LOCAL_LAUNCHER = "rollout.launch.local:LocalLauncher"
TORCHRUN_LAUNCHER = "rollout.launch.torchrun:TorchrunLauncher"


def producer_options(settings: ProducerSettings) -> dict[str, Any]:
    """The settings as arguments of AsyncRolloutProducer, with functions in place of their paths.

    Raises ConfigError for a path that names none.
    """
    options = {field.name: getattr(settings, field.name) for field in fields(settings)}
    filters = [
        import_function(own.path, own.options, f"producer.group_filters.{name}")
        for name, own in settings.group_filters.items()
    ]
    return {**options, "group_filters": filters, "curriculum": _curriculum(settings.curriculum)}


def new_launcher(settings: FunctionSettings) -> Launcher:
    """What starts the engines of one fleet. Raises ConfigError for a path that names none, and for
    options that it does not take."""
    kind = import_object(settings.path, "launcher.path")
    try:
        launcher: Launcher = kind(**settings.options)
    except TypeError as error:
        raise ConfigError(
            f"launcher.options={dict(settings.options)}: {settings.path}: {error}"
        ) from error
    return launcher


def _curriculum(settings: CurriculumSettings | None) -> Curriculum | None:
    if settings is None:
        return None
    weight = import_function(settings.path, settings.options, "producer.curriculum")
    return Curriculum(weight=weight, with_replacement=settings.with_replacement)
