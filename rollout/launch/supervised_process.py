"""SupervisedProcess: a child process that is restarted when it fails.

Used by `rollout.launch.local` for engines, and by `rollout.apis.fleet_processes` for the
coordinator. It starts processes and a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from types import MappingProxyType
from typing import Any

from rollout.child_process import ChildProcess, end_of
from rollout.errors import ConfigError

_logger = logging.getLogger(__name__)
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 60.0
# The count of restarts in a row is reset by a process that has run for longer than this.
STEADY_S = 600.0


class SupervisedProcess:
    """A child process, and the thread that starts it, waits for its end and restarts it.

    `started` is a future of the first child's first message, which the child sends once it is
    ready. The future raises the error if the first start fails. A child whose exit code is not 0 is
    restarted, at most `max_restarts` times in a row, after pauses that double. A process whose
    first start fails is not restarted."""

    def __init__(
        self,
        name: str,
        module: str,
        begin: Callable[[ChildProcess], object],
        *,
        start_timeout_s: float,
        max_restarts: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
        on_end: Callable[[int], object] = lambda exit_code: None,
    ) -> None:
        """Start a child that runs `module`. Raises ConfigError if the child cannot be started.

        name: name for log messages and the thread.
        begin: sends a child its arguments.
        start_timeout_s: seconds until a child must be ready.
        environment: environment variables that differ from this process's.
        on_end: gets the last exit code once the process has ended for good, unless the first start
            failed.

        The supervising thread calls `begin` and `on_end`."""
        self.name, self._module, self._begin = name, module, begin
        self._start_timeout_s, self._max_restarts = start_timeout_s, max_restarts
        self._on_end = on_end
        self.started: futures.Future[Any] = futures.Future()
        self._is_ending = threading.Event()
        self._lock = threading.Lock()  # guards `_child`: none is started after the end
        self._environment = environment
        self._child = ChildProcess(module, environment)
        self._thread = threading.Thread(target=self._supervise, name=f"{name} watch", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of the latest child."""
        return self._child.pid

    @property
    def place(self) -> str:
        return f"process {self.pid}"

    def end_restarts(self) -> None:
        self._is_ending.set()

    def terminate(self) -> None:
        with self._lock:
            self._child.terminate()

    def kill(self) -> None:
        with self._lock:
            self._child.kill()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the process has ended for good. Call `end_restarts` first."""
        self._thread.join(timeout_s)

    # ---- the supervising thread

    def _supervise(self) -> None:
        num_restarts = 0
        while True:
            began_at = time.monotonic()
            exit_code = self._run_child()
            if self.started.exception() is not None:
                return
            if time.monotonic() - began_at > STEADY_S:
                num_restarts = 0
            if exit_code == 0 or (count := self._restart(exit_code, num_restarts)) is None:
                break
            num_restarts = count
        self._on_end(exit_code)

    def _run_child(self) -> int:
        """Send the child its arguments, set `started` once it is ready, and wait for its end.
        Returns the child's exit code. A child that is not ready in time is killed."""
        child, is_first = self._child, not self.started.done()
        try:
            self._begin(child)
            if not self._max_restarts:
                del self._begin  # it may hold arguments as large as a model
            ready = child.receive(self._start_timeout_s)
        except Exception as fault:  # `started` raises it
            child.kill()
            error = fault
            if isinstance(fault, OSError):
                error = ConfigError(f"{child.name} died while it started: {fault}")
            if is_first:
                self.started.set_exception(error)
            else:
                _logger.warning("%s could not be restarted: %s", self.name, error)
        else:
            if is_first:
                self.started.set_result(ready)
            else:
                _logger.warning("%s was restarted as process %d", self.name, child.pid)
        exit_code = child.wait()
        child.pipe.close()
        return exit_code

    def _restart(self, exit_code: int, num_restarts: int) -> int | None:
        """Wait for the pause and start another child. Tries again if the system refuses to start
        it. Returns the number of restarts in a row, or None if restarts are disabled or used up."""
        if self._is_ending.is_set():
            return None
        end = f"{self.name} ({self.place}) has ended ({end_of(exit_code)})"
        if num_restarts >= self._max_restarts:
            _logger.error("%s, after %d restarts in a row", end, num_restarts)
            return None
        pause_s = min(FIRST_BACKOFF_S * 2**num_restarts, MAX_BACKOFF_S)
        _logger.warning("%s; it is restarted in %g s", end, pause_s)
        if self._is_ending.wait(pause_s):
            return None
        try:
            with self._lock:
                if self._is_ending.is_set():
                    return None
                self._child = ChildProcess(self._module, self._environment)
        except ConfigError as error:
            _logger.warning("%s could not be restarted: %s", self.name, error)
            return self._restart(exit_code, num_restarts + 1)
        return num_restarts + 1
