"""Launcher: the protocol of what starts the engines of a fleet, on this machine or on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """What all engines of a fleet are started with.

    `module`: its `run_engine(address, **arguments, on_registered=...)` is an engine from its start
    to its end. `arguments`: all others of that function, among them the CURVE keys of the fleet's
    engines, if it has keys. They may be the trainer's own model: what goes elsewhere is copied
    before `launch` returns. `num_gpus`: on which each engine computes.

    `address`: of the coordinator, in the future, since an engine can begin to start before.
    `max_restarts`: how often an engine that ends is started again. `start_timeout_s`: how long one
    may take from its start until the fleet has it.
    `on_end`: called with an engine's name once it is given up, from any thread, and with what has
    ended it; None: it was told to end.
    """

    module: str
    arguments: Mapping[str, Any]
    num_gpus: int
    address: Future[str]
    max_restarts: int
    start_timeout_s: float
    on_end: Callable[[str, str | None], object]


class LaunchedEngine(Protocol):
    """An engine that a launcher has started, through all its restarts."""

    name: str
    started: Future[Any]  # done once the fleet has it; raises what keeps it from starting

    @property
    def place(self) -> str:
        """Where it runs now, for messages: "process 123"."""

    def end_restarts(self) -> None:
        """Start it no more from now on."""

    def terminate(self) -> None:
        """Ask it to end. Does nothing if it has ended; so does `kill`."""

    def kill(self) -> None: ...

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended for good, which it does after `end_restarts`."""


class Launcher(Protocol):
    """Starts engines that dial a coordinator. One is for one fleet at a time."""

    @property
    def host(self) -> str | None:
        """The name or address of this machine that its engines can dial; None: they are all here.

        With a host, the fleet listens there unless it is told where, and has keys.
        """

    def num_threads(self, num_engines: int) -> int | None:
        """How many threads each of so many engines gets, if the config says nothing; None: as many
        as it finds processors."""

    def launch(self, job: EngineJob, num_engines: int) -> Sequence[LaunchedEngine]:
        """Begin to start engines, without waiting for them. Those that it does not return come by
        themselves, and are not watched.

        Raises ConfigError if they cannot be started, and leaves none then.
        """

    def close(self) -> None:
        """Free what the engines, which have ended, were given. A second call does nothing."""
