"""FleetProcesses: starts, watches and ends the processes of a coordinator and its engines.

Used by `rollout.apis.async_llm`. It starts the coordinator as a child process, and the engines with
a launcher.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from rollout.addresses import listening_host
from rollout.backends.select import block_size_of, needs_gpu
from rollout.child_process import end_of, pickled
from rollout.config import InferenceConfig
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.net.security import CurveKeys, CurveServerKeys, remove_private_address
from rollout.coordinator.routing.policies import find_policy
from rollout.errors import ConfigError, CoordinatorLostError
from rollout.launch.launcher import EngineJob, LaunchedEngine, Launcher
from rollout.launch.supervised_process import SupervisedProcess
from rollout.models.checkpoints.loading import without_shards
from rollout.text import Tokenizer

_logger = logging.getLogger(__name__)
_LEAVE_S = 5.0  # wait after the request to end, before SIGTERM
_END_S = 5.0  # wait after SIGTERM, before SIGKILL
REMIND_S = 30.0  # between two log lines about processes that have not started
_ENGINE_MODULE = "rollout.apis.engine_process"


class FleetProcesses:
    """The processes of a fleet. The constructor starts them, and `close` ends them.

    `launcher` starts the engines, and restarts a failed engine up to `max_engine_restarts` times.
    The fleet is lost when the coordinator ends. It is also lost when the last engine has used up
    its restarts and no other engine is expected to join. All processes are then ended, and another
    thread calls `on_lost` with the error.
    """

    def __init__(
        self,
        coordinator: Mapping[str, Any],
        engine: Mapping[str, Any],
        *,
        launcher: Launcher,
        spawn: int | None,
        max_engine_restarts: int,
        start_timeout_s: float,
        on_lost: Callable[[CoordinatorLostError], object],
    ) -> None:
        """Start the processes and wait until they run.

        coordinator: arguments of DataParallelInferenceCoordinator.
        engine: arguments of run_engine.
        spawn: number of engines to start; None for all engines.

        Raises ConfigError, and the error that keeps a process from starting.
        """
        num_expected = coordinator["data_parallel_size"]
        if spawn is not None and not 0 <= spawn <= num_expected:
            raise ConfigError(f"spawn={spawn} must be in [0, {num_expected}], or None for all")
        num_engines = num_expected if spawn is None else spawn
        if launcher.host is not None:
            coordinator = _with_keys(coordinator)
        self.curve: CurveKeys | None = None  # for the engines and the client of this fleet
        if coordinator.get("curve") is not None:
            server, self.curve = coordinator["curve"].with_client()
            coordinator = {**coordinator, "curve": server}
        for_coordinator = pickled(dict(coordinator), "an argument of the coordinator")
        self.lost: CoordinatorLostError | None = None
        self._on_lost, self._is_closing = on_lost, False
        self._lock = threading.Lock()  # guards `lost` and the count of failed engines
        self._launcher, self._num_expected, self._num_engines_lost = launcher, num_expected, 0
        self._engines: Sequence[LaunchedEngine] = ()
        self._coordinator = SupervisedProcess(
            "the coordinator",
            "rollout.coordinator",
            lambda child: child.send(for_coordinator),
            start_timeout_s=start_timeout_s,
            on_end=self._coordinator_ended,
        )
        try:
            config = _with_threads(engine["inference_config"], launcher, num_engines)
            job = EngineJob(
                module=_ENGINE_MODULE,
                arguments={**engine, "inference_config": config, "curve": self.curve},
                num_gpus=config.tensor_parallel_size if needs_gpu(config) else 0,
                address=self._coordinator.started,
                max_restarts=max_engine_restarts,
                start_timeout_s=start_timeout_s,
                on_end=self._engine_ended,
            )
            self._engines = launcher.launch(job, num_engines)
            self._await_start()
        except BaseException:  # even after Ctrl-C, since nothing else can end the processes
            self.close(asked=False)
            raise
        self.address = str(self._coordinator.started.result())

    def _await_start(self) -> None:
        """Wait until all processes have started, and log their progress. Raises the error of a
        start that fails, or `lost`."""
        start, waiting = time.monotonic(), [self._coordinator, *self._engines]
        while waiting:
            starts = [process.started for process in waiting]
            done, _ = futures.wait(starts, REMIND_S, return_when=futures.FIRST_COMPLETED)
            if self.lost is not None:
                raise self.lost
            for each in done:
                each.result()
            seconds = time.monotonic() - start
            for process in waiting:
                if process.started in done and process is not self._coordinator:
                    _logger.info("%s has started (%.1f s)", process.name, seconds)
            waiting = [process for process in waiting if process.started not in done]
            if not done:
                names = ", ".join(f"{each.name} ({each.place})" for each in waiting)
                _logger.warning("waiting for the start of %s since %.0f s", names, seconds)

    # ---- called by the supervising threads

    def _coordinator_ended(self, exit_code: int) -> None:
        end = f"process {self._coordinator.pid} has ended ({end_of(exit_code)})"
        self._fail(f"the coordinator is lost: {end}")

    def _engine_ended(self, name: str, reason: str | None) -> None:
        if reason is None:  # an orderly stop
            return
        with self._lock:
            self._num_engines_lost += 1
            is_last = self._num_engines_lost == self._num_expected == len(self._engines)
        if is_last:
            self._fail(f"no engine is left: {name} has used up its restarts ({reason})")

    def _fail(self, reason: str) -> None:
        """End the fleet as lost for `reason`, unless it is already lost or closing."""
        with self._lock:
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
        """Disable restarts from now on."""
        self._is_closing = True
        for process in (self._coordinator, *self._engines):
            process.end_restarts()

    def close(self, *, asked: bool = True) -> None:
        """End all processes and wait for their ends. A second call does nothing. If `asked`, the
        processes were already asked to end and get a few seconds for it."""
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
        self._launcher.close()
        if self._coordinator.started.exception() is None:
            # A coordinator that was killed has not removed its socket's directory.
            remove_private_address(str(self._coordinator.started.result()))


def coordinator_arguments(
    config: InferenceConfig,
    options: Mapping[str, Any],
    *,
    data_parallel_size: int,
    host: str | None,
    port: int | None,
    orphan_deadline_s: float,
) -> dict[str, Any]:
    """Return the arguments of DataParallelInferenceCoordinator. `options` replace other arguments.
    Raises ConfigError."""
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
        # The child process does not know policies that were registered in this process.
        arguments["prefix_caching_coordinator_policy"] = find_policy(policy)
    return arguments


def engine_arguments(
    model: Any,
    tokenizer: Tokenizer | None,
    config: InferenceConfig,
    weights_version: int,
    start_timeout_s: float,
) -> dict[str, Any]:
    """Return the arguments of `run_engine`, except the address and the keys. Raises ConfigError and
    ModelError."""
    if config.pg_collection is not None:
        raise ConfigError(
            "pg_collection needs LLM without a coordinator: a fleet starts the processes of its "
            "engines (tensor_parallel_size)"
        )
    return {
        "model": without_shards(model, config.dtype),
        "tokenizer": tokenizer,
        "inference_config": config,
        "weights_version": weights_version,
        "register_timeout_s": start_timeout_s,
    }


def _with_keys(coordinator: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the coordinator's arguments with new CURVE keys, for engines on other hosts. Arguments
    that already have keys, or set `insecure`, are returned unchanged."""
    if coordinator.get("curve") is not None or coordinator.get("insecure"):
        return coordinator
    return {**coordinator, "curve": CurveServerKeys.made()}


def _with_threads(config: InferenceConfig, launcher: Launcher, num_engines: int) -> InferenceConfig:
    """Return the config of one of `num_engines` engines, with `num_threads` set for each rank. A
    given `num_threads` is kept. Otherwise the ranks share the number of threads that the launcher
    has for an engine. It stays None if the launcher does not know this number."""
    num_threads = config.num_threads
    if num_threads is None and (of_engine := launcher.num_threads(num_engines)) is not None:
        num_threads = max(1, of_engine // config.tensor_parallel_size)
    return config.replace(num_threads=num_threads)


def _join(processes: Sequence[LaunchedEngine], timeout_s: float) -> None:
    """Wait up to `timeout_s` seconds until all processes have ended."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
