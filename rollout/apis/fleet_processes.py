"""FleetProcesses: starts, watches and ends the processes of a coordinator and its engines."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from functools import partial
from typing import Any

from rollout.backends.limits import num_usable_cpus
from rollout.backends.select import block_size_of
from rollout.child_process import ChildProcess, end_of, pickled
from rollout.config import InferenceConfig
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.dealer import CoordinatorLostError
from rollout.coordinator.routing.policies import find_policy
from rollout.coordinator.security import CurveKeys, listening_host, remove_private_address
from rollout.errors import ConfigError

_logger = logging.getLogger(__name__)
_LEAVE_S, _END_S = 5.0, 5.0
REMIND_S = 30.0  # between two lines about what is waited for
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 60.0
# A process that has run for so long ends a row of failures.
STEADY_S = 600.0


class FleetProcesses:
    """Started when it is made. Raises what keeps a process from starting.

    An engine that ends is started again, up to `max_engine_restarts` times in a row. The fleet is
    lost when the coordinator ends, or the last engine is given up and none is expected from
    elsewhere: all processes end, and `on_lost` is called with the reason, by another thread.
    """

    def __init__(
        self,
        coordinator: Mapping[str, Any],
        engine: Mapping[str, Any],
        *,
        spawn: int | None,
        max_engine_restarts: int,
        start_timeout_s: float,
        on_lost: Callable[[CoordinatorLostError], object],
    ) -> None:
        """`coordinator`: arguments of DataParallelInferenceCoordinator. `engine`: of run_engine.
        `spawn`: engines that are started here, None for all.
        """
        num_expected = coordinator["data_parallel_size"]
        if spawn is not None and not 0 <= spawn <= num_expected:
            raise ConfigError(f"spawn={spawn} must be in [0, {num_expected}], or None for all")
        num_engines = num_expected if spawn is None else spawn
        self.curve: CurveKeys | None = None  # of the fleet's own engines and client
        if coordinator.get("curve") is not None:
            server, self.curve = coordinator["curve"].with_client()
            coordinator = {**coordinator, "curve": server}
        for_coordinator = pickled(dict(coordinator), "an argument of the coordinator")
        # Once: the model may be the trainer's own, which goes on changing.
        what = "the model, its tokenizer or its config"
        config = _with_shared_threads(engine["inference_config"], num_engines)
        own = {"inference_config": config, "curve": self.curve}
        for_engine = pickled({**engine, **own}, what)
        self.lost: CoordinatorLostError | None = None
        self._on_lost, self._is_closing = on_lost, False
        self._turn = threading.Lock()  # held to say that the fleet is lost, and why
        self._num_engines_to_lose = num_engines
        self._expects_others = num_engines < num_expected
        self._engines: list[SupervisedProcess] = []
        self._coordinator = SupervisedProcess(
            "the coordinator",
            "rollout.coordinator",
            lambda child: child.send(for_coordinator),
            start_timeout_s=start_timeout_s,
            on_end=self._coordinator_ended,
        )
        try:
            # All at once: most of a start is imports, which need no address.
            for name in (f"engine {number}" for number in range(num_engines)):
                process = SupervisedProcess(
                    name,
                    "rollout.apis.engine_process",
                    partial(self._begin_engine, for_engine),
                    start_timeout_s=start_timeout_s,
                    max_restarts=max_engine_restarts,
                    on_end=partial(self._engine_ended, name),
                )
                self._engines.append(process)
            self._await_start()
        except BaseException:  # after Ctrl-C, too, nobody else knows the processes
            self.close(asked=False)
            raise
        self.address = str(self._coordinator.started.result())

    @property
    def pids(self) -> list[int]:
        """The coordinator's process, then those of the engines, also of those that have ended."""
        return [process.pid for process in (self._coordinator, *self._engines)]

    def _await_start(self) -> None:
        start, waiting = time.monotonic(), [self._coordinator, *self._engines]
        while waiting:
            starts = [process.started for process in waiting]
            done, _ = futures.wait(starts, REMIND_S, return_when=futures.FIRST_EXCEPTION)
            if self.lost is not None:
                raise self.lost
            for each in done:
                each.result()
            waiting = [process for process in waiting if not process.started.done()]
            if waiting:
                names = ", ".join(f"{each.name} (process {each.pid})" for each in waiting)
                seconds = time.monotonic() - start
                _logger.warning("waiting for the start of %s since %.0f s", names, seconds)

    # ---- what the supervising threads call

    def _begin_engine(self, arguments: bytes, child: ChildProcess) -> None:
        child.send(pickle.dumps(self._coordinator.started.result()), arguments)

    def _coordinator_ended(self, exit_code: int) -> None:
        end = f"process {self._coordinator.pid} has ended ({end_of(exit_code)})"
        self._lose(f"the coordinator is lost: {end}")

    def _engine_ended(self, name: str, exit_code: int) -> None:
        """It is not started again. One with exit code 0 was told to end, with the fleet."""
        with self._turn:
            self._num_engines_to_lose -= exit_code != 0
            is_last = not self._num_engines_to_lose and not self._expects_others
        if is_last and exit_code:
            self._lose(f"no engine is left: {name} has ended once too often ({end_of(exit_code)})")

    def _lose(self, reason: str) -> None:
        with self._turn:
            if self._is_closing or self.lost is not None:
                return
            self.lost = CoordinatorLostError(f"{reason}; make a new AsyncLLM")
        _logger.error("the fleet ends: %s", reason)
        self._on_lost(self.lost)
        for process in (*self._engines, self._coordinator):
            process.end_restarts()
            process.terminate()

    # ---- the end

    def end_restarts(self) -> None:
        """Start no process again from now on."""
        self._is_closing = True
        for process in (self._coordinator, *self._engines):
            process.end_restarts()

    def close(self, *, asked: bool = True) -> None:
        """End all processes. `asked`: they were told to end, and get some seconds for it. A second
        call does nothing.
        """
        self.end_restarts()
        processes = [self._coordinator, *self._engines]
        if asked:
            _join(processes, _LEAVE_S)
        for process in processes:
            process.terminate()
        _join(processes, _END_S)
        for process in processes:
            process.kill()
            process.join()
        if self._coordinator.started.exception() is None:
            # A killed coordinator has not removed its directory.
            remove_private_address(str(self._coordinator.started.result()))


class SupervisedProcess:
    """A child process and the thread that begins it, waits for its end and starts it again.

    Started when it is made. `started` is a future of what its child says once it is ready. A child
    that ends with another exit code than 0 is started again, up to `max_restarts` times in a row,
    after pauses that double. One that cannot start the first time is not.
    """

    def __init__(
        self,
        name: str,
        module: str,
        begin: Callable[[ChildProcess], object],
        *,
        start_timeout_s: float,
        max_restarts: int = 0,
        on_end: Callable[[int], object] = lambda exit_code: None,
    ) -> None:
        """`begin` sends a child its arguments. `on_end` gets the last exit code once the process
        is given up, if it had been ready. The supervising thread calls both.
        """
        self.name, self._module, self._begin = name, module, begin
        self._start_timeout_s, self._max_restarts = start_timeout_s, max_restarts
        self._on_end = on_end
        self.started: futures.Future[Any] = futures.Future()
        self._is_ending = threading.Event()
        self._turn = threading.Lock()  # held to start a child, so that none is after the end
        self._child = ChildProcess(module)
        self._thread = threading.Thread(target=self._supervise, name=f"{name} watch", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Of the latest child."""
        return self._child.pid

    def end_restarts(self) -> None:
        self._is_ending.set()

    def terminate(self) -> None:
        with self._turn:
            self._child.terminate()

    def kill(self) -> None:
        with self._turn:
            self._child.kill()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the process has ended for good, which it does after `end_restarts`."""
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
            if exit_code == 0 or not self._restart(exit_code, num_restarts):
                break
            num_restarts += 1
        self._on_end(exit_code)

    def _run_child(self) -> int:
        """Begin the child and wait for its end."""
        child, is_first = self._child, not self.started.done()
        try:
            self._begin(child)
            if not self._max_restarts:
                del self._begin  # what it sends may be as large as a model
            word = child.receive(self._start_timeout_s)
        except Exception as fault:  # whoever waits for the start must hear of it
            child.kill()
            error = fault
            if isinstance(fault, OSError):
                error = ConfigError(f"{child.name} died while it started: {fault}")
            if is_first:
                self.started.set_exception(error)
            else:
                _logger.warning("%s could not start again: %s", self.name, error)
        else:
            if is_first:
                self.started.set_result(word)
            else:
                _logger.warning("%s is back as process %d", self.name, child.pid)
        exit_code = child.wait()
        child.pipe.close()
        return exit_code

    def _restart(self, exit_code: int, num_restarts: int) -> bool:
        """Start another child after a pause, unless that is over."""
        if self._is_ending.is_set():
            return False
        end = f"{self.name} (process {self.pid}) has ended ({end_of(exit_code)})"
        if num_restarts >= self._max_restarts:
            _logger.error("%s, after %d restarts in a row", end, num_restarts)
            return False
        pause_s = min(FIRST_BACKOFF_S * 2**num_restarts, MAX_BACKOFF_S)
        _logger.warning("%s; it is started again in %g s", end, pause_s)
        if self._is_ending.wait(pause_s):
            return False
        with self._turn:
            if not self._is_ending.is_set():
                self._child = ChildProcess(self._module)
                return True
        return False


def coordinator_arguments(
    config: InferenceConfig,
    options: Mapping[str, Any],
    *,
    data_parallel_size: int,
    host: str | None,
    port: int | None,
    orphan_deadline_s: float,
) -> dict[str, Any]:
    """What DataParallelInferenceCoordinator takes; `options` go first. Raises ConfigError."""
    arguments = {
        "data_parallel_size": data_parallel_size,
        "inference_coordinator_port": port,
        "block_size_tokens": block_size_of(config),
        "enable_prefix_caching": config.enable_prefix_caching,
        "prefix_caching_coordinator_policy": config.prefix_caching_coordinator_policy,
        "limits": CoordinatorLimits(orphan_deadline_s=orphan_deadline_s),
        "host": listening_host(host, port),
        **options,
    }
    policy = arguments["prefix_caching_coordinator_policy"]
    if type(policy) is str:
        # Looked up here: what this process has registered is unknown in another one.
        arguments["prefix_caching_coordinator_policy"] = find_policy(policy)
    return arguments


def _with_shared_threads(config: InferenceConfig, num_engines: int) -> InferenceConfig:
    """The config of one of so many engines here: their threads share the processors."""
    threads = config.num_threads or max(1, num_usable_cpus() // max(1, num_engines))
    return config.replace(num_threads=threads)


def _join(processes: list[SupervisedProcess], timeout_s: float) -> None:
    """Wait up to `timeout_s` seconds for all of them together."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
