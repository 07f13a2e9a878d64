"""The walks of docs/architecture.md: the named functions are called in that order."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rollout import DynamicInferenceEngine, InferenceClient, SamplingParams
from tests.coordinator.live_fleet import LiveFleet
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


class Recorder:
    """As `calls_of`, of all threads that are started inside the block, as long as `is_on`."""

    def __init__(self, root: Path) -> None:
        self._package, self.is_on = str(root / "rollout") + "/", False
        self.calls: list[Step] = []

    def __enter__(self) -> Recorder:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if self.is_on and event == "call" and name.startswith(self._package):
            self.calls.append((name.removeprefix(self._package), frame.f_code.co_name))


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
    assert_in_order(steps, calls_of(root, lambda: command(engine)))


def assert_in_order(steps: list[Step], made: list[Step]) -> None:
    calls = iter(made)
    for file, function in steps:
        wanted = (file, function.rpartition(".")[2])
        assert wanted in calls, f"{file} {function} is not called after the step above it"


async def request(client: InferenceClient) -> None:
    await client.add_request(prompt_of(5), SamplingParams(num_tokens_to_generate=2))


async def stream(client: InferenceClient) -> None:
    async for _ in client.stream(prompt_of(5), SamplingParams(num_tokens_to_generate=2)):
        pass


async def command(client: InferenceClient) -> None:
    await client.pause_engines()


@pytest.mark.parametrize(
    ("title", "order"),
    [("A request", request), ("A streamed token", stream), ("A command", command)],
)
def test_the_functions_of_a_walk_through_the_coordinator_are_called_in_its_order(
    root: Path, title: str, order: Callable[[InferenceClient], Awaitable[None]]
) -> None:
    async def recorded(recorder: Recorder) -> None:
        with LiveFleet(1) as fleet:
            async with InferenceClient(fleet.address) as client:
                await request(client)  # by then all have shaken hands
                recorder.is_on = True
                await order(client)
                recorder.is_on = False

    steps = walk(root, f"{title} through the coordinator")
    assert len(steps) >= 5
    with Recorder(root) as recorder:
        asyncio.run(recorded(recorder))
    assert_in_order(steps, recorder.calls)
