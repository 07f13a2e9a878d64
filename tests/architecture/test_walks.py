"""The lists of docs/architecture.md and docs/protocol.md: each names functions that call each other
in that order."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rollout import LLM, DynamicInferenceEngine, InferenceClient, SamplingParams, ServeConfig
from tests.coordinator.live_fleet import LiveFleet
from tests.serve import chat_model
from tests.serve.served import CONFIG
from tests.tiny_models import drain, prompt_of, tiny_engine, tiny_model
from trainer_hooks import WeightSync

_ROW = re.compile(r"^\| `(\S+\.py)` \| `(\S+)` \|", re.MULTILINE)
Step = tuple[str, str]  # file, function


def steps_of(root: Path, page: str, title: str) -> list[Step]:
    """Return the rows of the section `### title`."""
    text = (root / "docs" / page).read_text(encoding="utf-8")
    section = text.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
    return _ROW.findall(section)


class Recorder:
    """Records the calls of the project's code, also in threads started inside the block, while
    `is_on`."""

    def __init__(self, root: Path) -> None:
        self._root, self.is_on = f"{root}/", False
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
        if self.is_on and event == "call" and name.startswith(self._root):
            self.calls.append((name.removeprefix(self._root), frame.f_code.co_name))


def assert_in_order(steps: list[Step], made: list[Step]) -> None:
    calls: Iterator[Step] = iter(made)
    for file, function in steps:
        wanted = (file, function.rpartition(".")[2])
        assert wanted in calls, f"{file} {function} is not called after the step above it"


def generate(engine: DynamicInferenceEngine) -> None:
    engine.add_request(prompt_of(9), SamplingParams(num_tokens_to_generate=2))
    assert len(drain(engine)) == 1


def test_the_steps_of_a_request_are_called_in_order(root: Path) -> None:
    steps = steps_of(root, "architecture.md", "A request, in eight steps")
    assert len(steps) == 8
    engine = tiny_engine(tiny_model(seed=1), num_blocks=32)
    with Recorder(root) as recorder:
        recorder.is_on = True
        generate(engine)
    assert_in_order(steps, recorder.calls)


def suspend(llm: LLM) -> None:
    llm.pause()
    llm.suspend("recompute")


def push(llm: LLM) -> None:
    llm.pause()
    WeightSync(llm).push(tiny_model(seed=2))


@pytest.mark.parametrize(
    ("title", "call"),
    [
        ("From `LLM.suspend` to `KVCache.release`", suspend),
        ("From `WeightSync.push` to a layer's weight", push),
    ],
    ids=["LLM.suspend", "WeightSync.push"],
)
def test_the_steps_of_a_call_of_an_llm_are_called_in_order(
    root: Path, title: str, call: Callable[[LLM], None]
) -> None:
    steps = steps_of(root, "architecture.md", title)
    assert len(steps) >= 10
    with LLM(tiny_model(seed=1), inference_config=CONFIG) as llm, Recorder(root) as recorder:
        recorder.is_on = True
        call(llm)
    assert_in_order(steps, recorder.calls)


def test_the_steps_of_a_chat_request_are_called_in_order(root: Path) -> None:
    steps = steps_of(root, "architecture.md", "From a chat request to `Engine.add_groups`")
    assert len(steps) >= 6
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with Recorder(root) as recorder, LLM(chat_model.directory(), inference_config=CONFIG) as llm:
        llm.serve(ServeConfig(port=0), blocking=False)
        assert llm.serving_address is not None
        url = "http://{}:{}/v1/chat/completions".format(*llm.serving_address)
        headers = {"Content-Type": "application/json"}
        chat = urllib.request.Request(url, json.dumps(body).encode(), headers)
        recorder.is_on = True
        with urllib.request.urlopen(chat, timeout=60) as reply:
            assert json.load(reply)["choices"]
        recorder.is_on = False
    assert_in_order(steps, recorder.calls)


async def request(client: InferenceClient) -> None:
    await client.add_request(prompt_of(5), SamplingParams(num_tokens_to_generate=2))


async def stream(client: InferenceClient) -> None:
    async for _ in client.stream(prompt_of(5), SamplingParams(num_tokens_to_generate=2)):
        pass


async def command(client: InferenceClient) -> None:
    await client.pause_engines()


@pytest.mark.parametrize(
    ("title", "call"),
    [("A request", request), ("A streamed token", stream), ("A command", command)],
)
def test_the_steps_of_a_call_through_the_coordinator_are_called_in_order(
    root: Path, title: str, call: Callable[[InferenceClient], Awaitable[None]]
) -> None:
    async def recorded(recorder: Recorder) -> None:
        with LiveFleet(1) as fleet:
            async with InferenceClient(fleet.address) as client:
                await request(client)  # by then all are connected
                recorder.is_on = True
                await call(client)
                recorder.is_on = False

    steps = steps_of(root, "protocol.md", f"{title} through the coordinator")
    assert len(steps) >= 5
    with Recorder(root) as recorder:
        asyncio.run(recorded(recorder))
    assert_in_order([(f"rollout/{file}", name) for file, name in steps], recorder.calls)
