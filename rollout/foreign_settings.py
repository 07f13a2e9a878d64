"""Checks config objects of TRL and verl whose settings are translated to ours.

Used by `trainer_hooks.trl_settings` and `rollout_verl.fields`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RefusedSetting:
    """A setting that an engine cannot honour.

    neutral: values that, like None, have no effect.
    remedy: advice for the error message.
    """

    neutral: tuple[Any, ...]
    remedy: str

    def is_asked_by(self, value: Any) -> bool:
        """Return whether `value` asks for the refused behaviour."""
        return value is not None and value not in self.neutral


def unknown_changes(config: Any, known: Container[str]) -> list[str]:
    """Return the names of `config`'s fields that are neither in `known` nor at their defaults.
    Newer versions of the other project add such fields. Returns [] unless `config` is a dataclass
    instance."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return [
        field.name
        for field in fields
        if field.name not in known and field.init and getattr(config, field.name) != _default(field)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()
