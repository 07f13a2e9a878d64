"""Settings of other projects' config classes: what is refused, and what nobody has looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rollout.foreign_settings import RefusedSetting, unknown_changes


@dataclass
class TheirConfig:
    known: int = 1
    number: int = 2
    names: list[str] = field(default_factory=list)
    derived: int = field(init=False, default=0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"known": 5}, []),
        ({"number": 5}, ["number"]),
        ({"number": 5, "names": ["a"]}, ["number", "names"]),
    ],
)
def test_unknown_changes_are_unknown_settings_off_their_defaults(
    changes: dict[str, object], found: list[str]
) -> None:
    config = TheirConfig(**changes)  # type: ignore[arg-type]
    config.derived = 7
    assert unknown_changes(config, {"known"}) == found
    assert unknown_changes(object(), {"known"}) == []


def test_a_refused_setting_is_asked_by_values_that_are_not_neutral() -> None:
    setting = RefusedSetting((1,), "leave it at 1")
    assert [setting.is_asked_by(value) for value in (None, 1, 2)] == [False, False, True]
