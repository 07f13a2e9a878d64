"""The example with a Python tool runs, and what its programs do is counted."""

from __future__ import annotations

import asyncio
import re

import pytest

from examples import python_tool
from rollout.errors import ConfigError
from trainer_hooks.environments.python_tool import PythonTool


def test_the_example_trains_on_programs_that_ran_and_that_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        PythonTool(python_tool.PYTHON)
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(python_tool, "BATCH_GROUPS", 3)
    monkeypatch.setattr(python_tool, "GROUP_SIZE", 4)
    rewards = asyncio.run(asyncio.wait_for(python_tool.train(num_steps=2), 110))
    shown = capsys.readouterr().out
    assert len(rewards) == shown.count("reward") == 2
    ran, failed, stopped = (
        sum(map(int, re.findall(rf"(\d+) {end}", shown))) for end in ("ran", "failed", "stopped")
    )
    assert min(ran, failed) > 0
    assert ran + failed + stopped <= 2 * 3 * python_tool.GROUP_SIZE
    assert max(rewards) > 0.0


def test_a_question_is_answered_by_its_own_program() -> None:
    rows = python_tool.questions(0, 6)
    assert [row["prompt"] for row in rows[:3]] == ["sum", "difference", "product"]
    tokenizer = python_tool.tiny_tokenizer()
    text = python_tool.call("print(a + b)")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == 1
