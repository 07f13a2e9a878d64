"""Settings of other projects' config classes: those that no engine can follow, and unknown ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RefusedSetting:
    """A setting that no engine can follow. `neutral`: values that ask for nothing, beside None."""

    neutral: tuple[Any, ...]
    remedy: str

    def is_asked_by(self, value: Any) -> bool:
        """Return whether `value` asks for what is refused."""
        return value is not None and value not in self.neutral


def unknown_changes(config: Any, known: Container[str]) -> list[str]:
    """Return the fields of a config dataclass that are not `known` and not at their defaults.

    They are settings of a newer version of the other project. Returns [] for another object.
    """
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return [
        field.name
        for field in fields
        if field.name not in known and field.init and getattr(config, field.name) != _default(field)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()
