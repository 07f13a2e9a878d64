"""`stall_seconds` of an update is the time for which requests wait for it."""

from __future__ import annotations

import time
from typing import Any

from rollout import SamplingParams
from tests.tiny_models import prompt_of, tiny_engine, tiny_model

MODEL: Any = tiny_model("qwen3", seed=20)
WEIGHTS = dict(tiny_model("qwen3", seed=21).named_parameters())


def running_engine() -> Any:
    engine = tiny_engine(MODEL, num_blocks=64)
    engine.add_request(prompt_of(5), SamplingParams(num_tokens_to_generate=20, seed=0))
    engine.step()
    return engine


def test_stall_seconds_begin_with_the_end_of_the_last_step() -> None:
    engine = running_engine()
    staged = engine.stage_weights(WEIGHTS)
    engine.step()
    time.sleep(0.05)
    report = engine.commit_weights(staged, in_flight=True)
    assert report.stall_seconds >= 0.05
    assert report.seconds - staged.seconds < report.stall_seconds


def test_stall_seconds_include_staging_between_two_steps() -> None:
    engine = running_engine()
    report = engine.update_weights(
        ((time.sleep(0.01), pair)[1] for pair in WEIGHTS.items()), in_flight=True
    )
    assert report.stall_seconds >= 0.01 * len(WEIGHTS)


def test_stall_seconds_of_an_idle_engine_are_the_commit_alone() -> None:
    engine = running_engine()
    engine.pause()
    staged = engine.stage_weights(WEIGHTS)
    time.sleep(0.05)
    report = engine.commit_weights(staged)
    assert report.stall_seconds <= report.seconds - staged.seconds
