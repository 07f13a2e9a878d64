"""The files of one run: its logger, settings, directory and lock, and a clean stop on Ctrl-C.

Used by `trainer_hooks.train.main`. `trainer_hooks.train.report` and `trainer_hooks.train.summary`
use CONFIG_NAME. It renames and makes directories, writes lock files, config.yaml and starts.jsonl,
opens metrics.jsonl, and changes the handlers of SIGINT and SIGTERM.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from rollout import __version__
from rollout.errors import ConfigError
from rollout.set_aside import set_aside
from trainer_hooks.files import replace_text
from trainer_hooks.metrics import JsonlWriter, MetricsLogger, start_wandb_run
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.logger import MetricsView
from trainer_hooks.metrics.wandb_run import where_to_look
from trainer_hooks.train.config_loading import as_plain
from trainer_hooks.train.hydra_job import given_overrides, wandb_names
from trainer_hooks.train.run_results import METRICS_NAME, STARTS_NAME
from trainer_hooks.weight_sync.trainer_ranks import torchrun_place

_log = logging.getLogger(__name__)
STOPPING = "stopping after this step; Ctrl-C again to stop now"
STOPPING_NOW = "stopping now"
CONFIG_NAME = "config.yaml"  # all settings of a run, in its directory
_GIT_TIMEOUT_S = 10.0  # long enough for a slow file system


def open_logger(
    directory: Path, settings: Any, view: MetricsView, resume_step: int | None = None
) -> MetricsLogger:
    """Return a logger to metrics.jsonl in `directory`, to `view` and, if the settings ask, to W&B.
    Also records the start of the run in STARTS_NAME.

    `settings`: the job's JobSettings, which W&B shows as the run's config.
    `resume_step`: step from which a resumed run continues. None begins a new metrics.jsonl.
    """
    wandb_run, wanted, ran = None, settings.logger, what_ran(settings)
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
        ran["wandb"] = where_to_look(wandb_run)
        if wanted.console:
            Console().print(ran["wandb"], highlight=False, soft_wrap=True)
    with closing(JsonlWriter(directory / STARTS_NAME, resume_step)) as starts:
        starts.log({TRAINER_STEP: resume_step or 0, **ran})
    return MetricsLogger(
        jsonl=directory / METRICS_NAME, wandb=wandb_run, console=view, resume_step=resume_step
    )


def what_ran(settings: Any) -> dict[str, Any]:
    """Return the record of this process for STARTS_NAME: command, versions, commit and others.

    `settings` is the job's JobSettings. The commit ends in "-dirty" if tracked files have changes.
    """
    libraries = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "title": settings.title,
        "model": settings.model.title,
        "command": _command(),
        "overrides": given_overrides(),
        "num_ranks": torchrun_place()[1],
        "versions": {"rollout": __version__, **libraries, "Python": platform.python_version()},
        "commit": _commit(),
    }


def _command() -> str:
    program, *words = sys.orig_argv
    if words and Path(words[0]).name == "rollout":  # the installed script
        program, *words = words
    return shlex.join([Path(program).name, *words])


def _commit() -> str | None:
    command = ("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def begin_directory(directory: Path) -> None:
    """Create an empty `directory`. An existing directory of that name is renamed first."""
    set_aside(directory)
    directory.mkdir(parents=True)


def write_config(directory: Path, settings: Any) -> None:
    """Write all settings of a run, a JobSettings, to CONFIG_NAME in `directory`. An existing file
    with other settings is renamed first."""
    path, text = directory / CONFIG_NAME, OmegaConf.to_yaml(OmegaConf.create(as_plain(settings)))
    if path.exists() and path.read_text(encoding="utf-8") != text:
        set_aside(path)
    replace_text(path, text)


@contextmanager
def locked_run(directory: Path) -> Iterator[None]:
    """Hold the lock on a run's directory during the block.

    Raises ConfigError, naming the process, if another job holds it. The lock is an flock on
    .<name>.lock beside the directory, because the directory can be renamed. The kernel releases the
    lock when the process ends. Other hosts respect it on Linux NFS, and on Lustre with the mount
    option flock. On a file system without locks a warning is logged instead.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.with_name(f".{directory.name}.lock")
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ConfigError(
                f"another job ({file.read().strip() or 'unknown process'}) is running in "
                f"{directory}; give this one a run_name of its own, or wait until the other ends"
            ) from error
        except OSError as error:
            _log.warning(
                "the file system of %s has no locks (%s): start no other job of this run_name",
                path, error,
            )  # fmt: skip
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextmanager
def stop_on_interrupt(announce: Callable[[str], object]) -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT (Ctrl-C) or SIGTERM sets.

    So a training step is not interrupted halfway, with weights that belong to no step. A second
    signal of the same kind acts as before the block. `announce` is called in a thread, with
    STOPPING after the first signal and STOPPING_NOW after the second.
    """
    requested = threading.Event()
    before = {int(name): signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    # A signal can interrupt the main thread while it prints, so a thread announces. A signal can
    # interrupt SimpleQueue.put, unlike Queue.put.
    texts: SimpleQueue[str | None] = SimpleQueue()

    def request(number: int, frame: FrameType | None) -> None:
        requested.set()
        texts.put(STOPPING)
        signal.signal(number, stop_now)

    def stop_now(number: int, frame: FrameType | None) -> None:
        texts.put(STOPPING_NOW)
        signal.signal(number, before[number])
        signal.raise_signal(number)

    def announce_all() -> None:
        while (text := texts.get()) is not None:
            announce(text)

    thread = threading.Thread(target=announce_all, name="announcements", daemon=True)
    thread.start()
    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        texts.put(None)
        thread.join()
