"""The walks of docs/architecture.md: the named functions are called in that order."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rollout import DynamicInferenceEngine, SamplingParams
from tests.tiny_models import drain, prompt_of, tiny_engine, tiny_model

_ROW = re.compile(r"^\| `(\S+\.py)` \| `(\S+)` \|", re.MULTILINE)
Step = tuple[str, str]  # file below rollout/, function


def walk(root: Path, title: str) -> list[Step]:
    """The rows of the section `### title`."""
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
    return _ROW.findall(section)


def calls_of(root: Path, command: Callable[[], Any]) -> list[Step]:
    """(file, function without its class) of each call of the package's code, in order."""
    package, calls = str(root / "rollout") + "/", []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(package):
            calls.append((name.removeprefix(package), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        command()
    finally:
        sys.setprofile(None)
    return calls


def generate(engine: DynamicInferenceEngine) -> None:
    engine.add_request(prompt_of(9), SamplingParams(num_tokens_to_generate=2))
    assert len(drain(engine)) == 1


def update(engine: DynamicInferenceEngine) -> None:
    source = dict(tiny_model(seed=2).named_parameters())
    engine.update_weights(source, in_flight=True)


@pytest.mark.parametrize(
    ("title", "command"), [("One token", generate), ("A weight update", update)]
)
def test_the_functions_of_a_walk_are_called_in_its_order(
    root: Path, title: str, command: Callable[[DynamicInferenceEngine], None]
) -> None:
    steps = walk(root, title)
    assert len(steps) >= 10
    engine = tiny_engine(tiny_model(seed=1), num_blocks=32)
    calls = iter(calls_of(root, lambda: command(engine)))
    for file, function in steps:
        wanted = (file, function.rpartition(".")[2])
        assert wanted in calls, f"{file} {function} is not called after the step above it"
