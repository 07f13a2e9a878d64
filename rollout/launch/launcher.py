"""Launcher: the protocol of objects that start the engines of a fleet.

Implemented by LocalLauncher, RayLauncher, SlurmLauncher and TorchrunLauncher of `rollout.launch`,
and by users. Called by `rollout.apis.async_llm` and `rollout.apis.fleet_processes`. RayLauncher and
SlurmLauncher call `run_to_end` and `summary_of`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from rollout.errors import RolloutError, encode_error

_logger = logging.getLogger(__name__)
_MAX_REASON_CHARS = 300  # an error of Ray may have pages


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """The arguments with which a launcher starts each engine of a fleet.

    `module`: name of a module whose `run_engine(address, **arguments, on_registered=...)` runs an
        engine until it ends.
    `arguments`: keyword arguments of `run_engine`, including CURVE keys if the fleet has keys.
        `launch` copies them before it returns, because one may be the trainer's own model.
    `num_gpus`: GPUs of each engine.
    `address`: future of the coordinator's address. An engine may begin to start before it is known.
    `max_restarts`: how often an engine that fails may be restarted.
    `start_timeout_s`: seconds from an engine's start until it must be registered with the fleet.
    `on_end`: called once a registered engine has ended for good, with the engine's name and the
        reason. The reason is None after an orderly stop. Any thread may call it."""

    module: str
    arguments: Mapping[str, Any]
    num_gpus: int
    address: Future[str]
    max_restarts: int
    start_timeout_s: float
    on_end: Callable[[str, str | None], object]


class LaunchedEngine(Protocol):
    """Protocol of one engine that a launcher has started. Restarts keep the object."""

    name: str
    started: Future[Any]  # done once the engine is registered; raises the error of its start

    @property
    def place(self) -> str:
        """Name for messages of the process or job that runs the engine now, such as "process
        123"."""

    def end_restarts(self) -> None:
        """Disable restarts from now on."""

    def terminate(self) -> None:
        """Ask the engine to end. Does nothing if the engine has ended."""

    def kill(self) -> None:
        """End the engine at once. Does nothing if the engine has ended."""

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the engine has ended for good. Call `end_restarts` first."""


class Launcher(Protocol):
    """Starts engines that connect to a coordinator. A launcher serves one fleet at a time."""

    @property
    def host(self) -> str | None:
        """Return the host at which engines reach this machine, or None if all engines run here. If
        there is a host, the coordinator listens at it by default, and the fleet has CURVE keys."""

    def num_threads(self, num_engines: int) -> int | None:
        """Return the number of threads for each of `num_engines` engines whose config sets none.
        None leaves the choice to the engine, which uses all processors that it finds."""

    def launch(self, job: EngineJob, num_engines: int) -> Sequence[LaunchedEngine]:
        """Begin to start engines, and return before they are registered. Engines that this launcher
        does not supervise are not in the list. Raises ConfigError if an engine cannot be started.
        No engine keeps running after the error."""

    def close(self) -> None:
        """Free the files and resources of engines that have ended. A second call does nothing."""


def run_to_end(
    module: str,
    address: str,
    load_arguments: Callable[[], Mapping[str, Any]],
    on_registered: Callable[[], object],
) -> dict[str, Any] | None:
    """Run an engine in this process until it ends. `module` is as in EngineJob. `load_arguments`
    returns the keyword arguments of `run_engine`. Returns None after an orderly stop. Otherwise
    returns the encoded error that ended the engine or was raised by `load_arguments`."""
    try:
        arguments = load_arguments()
        import_module(module).run_engine(address, **arguments, on_registered=on_registered)
    except Exception as error:
        if not isinstance(error, RolloutError):
            _logger.exception("the engine failed")
        return encode_error(error)
    return None


def summary_of(error: Exception) -> str:
    """Return an error's type and message on one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_REASON_CHARS]
