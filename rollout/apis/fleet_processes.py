"""FleetProcesses: the processes of a coordinator and its engines, and their certain end."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

from rollout.apis.supervised_process import SupervisedProcess
from rollout.backends.limits import num_usable_cpus
from rollout.child_process import ChildProcess, end_of, pickled
from rollout.config import InferenceConfig
from rollout.coordinator.core.limits import CoordinatorLimits
from rollout.coordinator.dealer import LOOPBACK, CoordinatorLostError
from rollout.coordinator.routing.policies import find_policy
from rollout.coordinator.security import CurveKeys, remove_private_address

_logger = logging.getLogger(__name__)
_LEAVE_S, _END_S = 5.0, 5.0
_REMIND_S = 30.0  # between two lines about what is waited for


class FleetProcesses:
    """Started when it is made. Raises what keeps a process from starting.

    An engine that ends is started again, up to `max_engine_restarts` times in a row. When the
    coordinator ends, so do the engines; `on_lost` is called with the reason, by another thread.
    """

    def __init__(
        self,
        coordinator: Mapping[str, Any],
        engine: Mapping[str, Any],
        *,
        num_engines: int,
        max_engine_restarts: int,
        start_timeout_s: float,
        on_lost: Callable[[CoordinatorLostError], object],
    ) -> None:
        """`coordinator`: arguments of DataParallelInferenceCoordinator. `engine`: of run_engine."""
        self.address = ""
        self.curve: CurveKeys | None = None  # of the fleet's own engines and client
        if coordinator.get("curve") is not None:
            server, self.curve = coordinator["curve"].with_client()
            coordinator = {**coordinator, "curve": server}
        for_coordinator = pickled(dict(coordinator), "an argument of the coordinator")
        # Kept for restarts: the model may be the trainer's own, which goes on changing.
        what = "the model, its tokenizer or its config"
        for_engine = pickled({**engine, "curve": self.curve}, what)
        self.lost: CoordinatorLostError | None = None
        self._on_lost, self._is_closing = on_lost, False
        self._engines: list[SupervisedProcess] = []
        self._coordinator = SupervisedProcess(
            "the coordinator",
            "rollout.coordinator",
            lambda child: child.send(for_coordinator),
            start_timeout_s=start_timeout_s,
            on_end=self._lose,
        )

        def begin_engine(child: ChildProcess) -> None:
            address = self._coordinator.started.result()
            child.send(pickle.dumps(address), for_engine)

        try:
            # All at once: most of a start is imports, which need no address.
            for number in range(num_engines):
                self._engines.append(
                    SupervisedProcess(
                        f"engine {number}",
                        "rollout.apis.engine_process",
                        begin_engine,
                        start_timeout_s=start_timeout_s,
                        max_restarts=max_engine_restarts,
                    )
                )
            self._await_start()
        except BaseException:
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
            done, _ = futures.wait(starts, _REMIND_S, return_when=futures.FIRST_EXCEPTION)
            if self.lost is not None:
                raise self.lost
            for each in done:
                each.result()
            waiting = [process for process in waiting if not process.started.done()]
            if waiting:
                names = ", ".join(f"{each.name} (process {each.pid})" for each in waiting)
                seconds = time.monotonic() - start
                _logger.warning("waiting for the start of %s since %.0f s", names, seconds)

    def _lose(self, exit_code: int) -> None:
        """The coordinator's process has ended, and engines are of no use without."""
        if self._is_closing:
            return
        end = f"process {self._coordinator.pid} has ended ({end_of(exit_code)})"
        self.lost = CoordinatorLostError(f"the coordinator is lost: {end}; make a new AsyncLLM")
        self._end_engines()
        self._on_lost(self.lost)

    def _end_engines(self) -> None:
        for engine in self._engines:
            engine.end_restarts()
            engine.terminate()

    def end_restarts(self) -> None:
        """From now on all processes may end."""
        self._is_closing = True
        for process in (self._coordinator, *self._engines):
            process.end_restarts()

    def close(self, *, asked: bool = True) -> None:
        """End what still runs. `asked`: they were told to end, and may take a moment for it.

        Twice is fine.
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
            # One that was killed has left it.
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
    """What DataParallelInferenceCoordinator takes; `options` go first. Raises ConfigError."""
    arguments = {
        "data_parallel_size": data_parallel_size,
        "inference_coordinator_port": port,
        "block_size_tokens": config.block_size_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "prefix_caching_coordinator_policy": config.prefix_caching_coordinator_policy,
        "limits": CoordinatorLimits(orphan_deadline_s=orphan_deadline_s),
        # Over TCP only if the user says where.
        "host": LOOPBACK if host is None and port is not None else host,
        **options,
    }
    policy = arguments["prefix_caching_coordinator_policy"]
    if type(policy) is str:
        # Looked up here: what this process has registered is unknown in another one.
        arguments["prefix_caching_coordinator_policy"] = find_policy(policy)
    return arguments


def engine_arguments(
    config: InferenceConfig, num_engines: int, start_timeout_s: float, own: Mapping[str, Any]
) -> dict[str, Any]:
    """What run_engine takes: `own`, and what follows for each of so many engines here."""
    threads = config.num_threads or max(1, num_usable_cpus() // max(1, num_engines))
    return {
        **own,
        "inference_config": config.replace(num_threads=threads),
        "register_timeout_s": start_timeout_s,
    }


def _join(processes: list[SupervisedProcess], timeout_s: float) -> None:
    """Wait for all of them, not for each."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
