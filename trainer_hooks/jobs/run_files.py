"""The files of one run, and Ctrl-C as a request to stop between two training steps."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from trainer_hooks.jobs.hydra_job import wandb_names
from trainer_hooks.metrics import MetricsLogger, start_wandb_run
from trainer_hooks.metrics.logger import MetricsView
from trainer_hooks.metrics.wandb_run import where_to_look


def open_logger(
    directory: Path, settings: Any, view: MetricsView, resume_step: int | None = None
) -> MetricsLogger:
    """The logger of the run in `directory`: its metrics.jsonl, `view` and, if wanted, a W&B run.

    `settings`: the job's dataclass, which W&B shows as the run's config; its `logger` holds
    LoggerSettings, its `run_name` names the run. `resume_step`: the step from which a resumed run
    continues; None starts metrics.jsonl anew.
    """
    wandb_run, wanted = None, settings.logger
    if wanted.wandb != "off":
        name, group = wandb_names(settings.run_name, directory.name)
        wandb_run = start_wandb_run(
            project=wanted.wandb_project,
            name=name,
            group=group,
            tags=wanted.wandb_tags,
            directory=directory,
            config=asdict(settings),
            mode=wanted.wandb,
            resume=resume_step is not None,
        )
        if wanted.console:
            Console().print(where_to_look(wandb_run), highlight=False, soft_wrap=True)
    return MetricsLogger(
        jsonl=directory / "metrics.jsonl", wandb=wandb_run, console=view, resume_step=resume_step
    )


def set_aside(directory: Path) -> None:
    """Rename what an earlier run left in `directory` to <directory>.previous, which is replaced."""
    previous = directory.with_name(f"{directory.name}.previous")
    if directory.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(directory, previous)
    directory.mkdir(parents=True)


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; a second one acts as it did before.

    A training step that ends halfway would leave weights that belong to no step.
    """
    requested = threading.Event()
    before = {int(name): signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: FrameType | None) -> None:
        requested.set()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
