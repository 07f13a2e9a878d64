"""Commands that installed packages add to `rollout` by the entry points rollout.commands."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rollout.cli import main as command_line

GIVEN: list[list[str]] = []


COMMANDS = re.compile(r'^(\w+) = "([\w.]+:\w+)"$', re.MULTILINE)


def run(words: list[str]) -> int:
    GIVEN.append(words)
    return 3


@pytest.fixture
def has_command(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("shine", f"{__name__}:run", command_line.ENTRY_POINTS)
    monkeypatch.setattr(
        command_line, "entry_points", lambda group: [entry] * (group == "rollout.commands")
    )


@pytest.mark.usefixtures("has_command")
def test_rollout_runs_the_command_of_an_entry_point_with_the_words_after_it() -> None:
    assert command_line.main(["shine", "--config-name", "demo", "seed=3"]) == 3
    assert GIVEN.pop() == ["--config-name", "demo", "seed=3"]


@pytest.mark.usefixtures("has_command")
def test_rollout_help_lists_the_command_of_an_entry_point(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["--help"]) == 0
    assert f"  shine        a command of {__name__}" in capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("has_command")
def test_a_misspelled_command_of_an_entry_point_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["shin"]) == 2
    assert "did you mean shine?" in capsys.readouterr().err


def test_rollout_knows_a_help_text_of_each_command_that_this_distribution_adds() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    table = project.partition('"rollout.commands"]')[2].partition("[")[0]
    commands = dict(COMMANDS.findall(table))
    assert commands.keys() == command_line.ABOUT_PACKAGES.keys() == {"train", "report"}
    for name, value in commands.items():
        assert callable(EntryPoint(name, value, command_line.ENTRY_POINTS).load())
