"""Metrics of a run: measuring them, and writing them to a JSONL file, wandb and the terminal.

Used by users' training loops, `trainer_hooks.train`, `benchmarks.async_training` and
`benchmarks.smollm`.
"""

from trainer_hooks.metrics.console import DEFAULT_COLUMNS, ProgressView
from trainer_hooks.metrics.histogram import read_histogram
from trainer_hooks.metrics.jsonl import JsonlWriter, read_jsonl
from trainer_hooks.metrics.logger import MetricsLogger
from trainer_hooks.metrics.measure import rollout_metrics, step_metrics
from trainer_hooks.metrics.step_warnings import WARNINGS, run_warnings
from trainer_hooks.metrics.time_account import EngineUse, StepTimes, TimeAccount
from trainer_hooks.metrics.wandb_run import start_wandb_run

__all__ = [
    "DEFAULT_COLUMNS",
    "EngineUse",
    "JsonlWriter",
    "MetricsLogger",
    "ProgressView",
    "StepTimes",
    "TimeAccount",
    "WARNINGS",
    "read_histogram",
    "read_jsonl",
    "rollout_metrics",
    "run_warnings",
    "start_wandb_run",
    "step_metrics",
]
