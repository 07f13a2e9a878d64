"""Which prompts and groups a job trains on: group filters and the curriculum of its settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trainer_hooks.curriculum import Curriculum
from trainer_hooks.jobs.import_paths import import_function
from trainer_hooks.jobs.settings import CurriculumSettings, ProducerSettings


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


def _curriculum(settings: CurriculumSettings | None) -> Curriculum | None:
    if settings is None:
        return None
    weight = import_function(settings.path, settings.options, "producer.curriculum")
    return Curriculum(weight=weight, with_replacement=settings.with_replacement)
