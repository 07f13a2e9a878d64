"""Exceptions of a metrics_writer do not change what an engine reports as done."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from rollout import LLM, InferenceConfig, SamplingParams
from rollout.control.state import EngineState
from rollout.telemetry import ObserverGuard
from tests.tiny_models import pool_gb, tiny_model
from trainer_hooks import MetricsLogger

PARAMS = SamplingParams(num_tokens_to_generate=3)


class Broken:
    """A metrics_writer, a wandb run and a view, whose disk is full."""

    def __init__(self) -> None:
        self.num_calls = 0

    def log(self, metrics: Mapping[str, float]) -> None:
        self.num_calls += 1
        raise OSError("no space left on device")

    def show(self, metrics: Mapping[str, float]) -> None:
        self.log(metrics)

    def close(self) -> None:
        self.log({})

    def finish(self, exit_code: int = 0) -> None:
        self.log({})


def test_an_exception_of_metrics_writer_undoes_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, writer = tiny_model(), Broken()
    config = InferenceConfig(
        metrics_writer=writer, logging_step_interval=1, buffer_size_gb=pool_gb(model, 64),
        block_size_tokens=8,
    )  # fmt: skip
    with LLM(model, None, config) as llm:
        assert llm.generate([1, 2, 3], PARAMS).num_generated_tokens == 3
        assert writer.num_calls >= 3
        llm.pause()
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        assert llm.update_weights(model.named_parameters()).version == 1
        assert llm.weights_version == 1
        assert llm.suspend("recompute").bytes_released > 0
        assert llm.state is EngineState.SUSPENDED
        assert llm.resume().seconds >= 0.0
        assert llm.state is EngineState.PAUSED
        llm.unpause()
        assert llm.generate([1, 2, 3], PARAMS).num_generated_tokens == 3
        stats = llm.stats()
        assert (stats.num_weight_updates, stats.num_suspends) == (1, 1)
    faults = [r for r in caplog.records if "metrics_writer" in r.getMessage()]
    assert len(faults) == 1
    assert faults[0].exc_info is not None


def test_an_interrupt_in_metrics_writer_is_raised() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ObserverGuard("the writer").call(interrupted)


def test_metrics_logger_writes_to_other_sinks_if_one_raises(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLogger(path, wandb=Broken(), console=Broken()) as logger:
        for step in range(3):
            logger.log({"train/loss": 0.5}, step=step, version=step)
    assert len(path.read_text().splitlines()) == 3
    assert len([r for r in caplog.records if "the wandb run failed" in r.getMessage()]) == 1
    assert len([r for r in caplog.records if "the view of the metrics" in r.getMessage()]) == 1
