"""RayLauncher: starts each engine as an actor of a Ray cluster. No other module imports Ray.

Users, and `rollout train` with `launcher=ray`, make a RayLauncher and give it to AsyncLLM.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rollout.errors import ConfigError, decode_error
from rollout.launch.launcher import EngineJob, run_to_end, summary_of

_logger = logging.getLogger(__name__)
REMIND_S = 30.0  # between two log lines about a reservation that takes long


class RayLauncher:
    """Starts engines as Ray actors, anywhere in the cluster, in one placement group.

    The coordinator stays with the caller. Engines connect to the caller's node over TCP with CURVE
    keys, which they get through Ray. The engines' nodes need the same packages and the model's
    files. Ray restarts a failed actor without a pause, `max_engine_restarts` times in all. Actors
    and the placement group end with the caller's Ray job, even if the caller is killed."""

    def __init__(
        self,
        *,
        num_cpus: float = 1.0,
        num_gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        runtime_env: Mapping[str, Any] | None = None,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the resources of each engine and the options of Ray.

        num_cpus, num_gpus, resources: resources of each engine. num_gpus=None means one GPU for
            each rank if the config's device is a GPU, else none.
        strategy: strategy of the placement group.
        runtime_env: runtime environment of the actors.
        init: arguments of ray.init, which `host` calls unless this process is connected to a
            cluster. `close` then ends the connection.

        Raises ConfigError if Ray is not installed."""
        self._ray = _imported_ray()
        self._num_cpus, self._num_gpus, self._resources = num_cpus, num_gpus, resources or {}
        self._strategy, self._runtime_env, self._init = strategy, runtime_env, init or {}
        self._is_own_session = False
        # While there are engines: their placement group, and the reference to their arguments.
        self._group: Any = None
        self._stored: Any = None

    @property
    def host(self) -> str:
        """Return this node's address. Connects this process to the cluster if it has no connection.
        Raises ConfigError if ray.init fails."""
        if not self._ray.is_initialized():
            try:
                self._ray.init(**self._init)
            except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(f"ray.init(**{dict(self._init)}) failed: {error}") from error
            self._is_own_session = True
        own = self._ray.get_runtime_context().get_node_id()
        return next(str(n["NodeManagerAddress"]) for n in self._ray.nodes() if n["NodeID"] == own)

    def num_threads(self, num_engines: int) -> int:
        return max(1, int(self._num_cpus))

    def launch(self, job: EngineJob, num_engines: int) -> list[RayEngine]:
        """Start the actors. See Launcher. Waits until Ray has reserved the resources of each
        engine, and for the coordinator's address. Raises ConfigError if the resources are not
        reserved after `job.start_timeout_s` seconds, or if the arguments cannot be pickled."""
        if not num_engines:
            return []
        try:
            arguments = self._ray.cloudpickle.dumps(dict(job.arguments))
        except Exception as error:  # objects of users may raise anything
            what = "the model, its tokenizer or its config"
            raise ConfigError(f"{what} cannot be sent to another process: {error}") from error
        bundle = self._bundle(job.num_gpus)
        self._reserve(bundle, num_engines, job.start_timeout_s)
        options = {
            "num_cpus": bundle.pop("CPU", 0.0),
            "num_gpus": bundle.pop("GPU", 0.0),
            "resources": bundle or None,
            "runtime_env": self._runtime_env and dict(self._runtime_env),
            "max_restarts": job.max_restarts,
            "max_task_retries": job.max_restarts,
            "max_concurrency": 2,  # one thread is the engine's
        }
        # In each node's memory once. Kept for actors that are started again.
        self._stored = self._ray.put(arguments)
        of_actor = job.module, job.address.result(), [self._stored]
        engines = []
        for number in range(num_engines):
            place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            )
            kind = self._ray.remote(EngineActor).options(**options, scheduling_strategy=place)
            engines.append(RayEngine(f"engine {number}", self._ray, kind.remote(*of_actor), job))
        return engines

    def close(self) -> None:
        """Remove the placement group, and leave the cluster if this launcher joined it."""
        if self._group is not None:
            with suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(self._group)
            self._group = self._stored = None
        if self._is_own_session:
            self._is_own_session = False
            self._ray.shutdown()

    def _bundle(self, num_gpus: float) -> dict[str, float]:
        """Return the resources of one engine under Ray's names. `num_gpus` counts only if the
        launcher was made without a number of GPUs. Raises ConfigError if an engine needs no
        resource, or a negative amount."""
        if self._num_gpus is not None:
            num_gpus = self._num_gpus
        needs = {"CPU": self._num_cpus, "GPU": num_gpus, **self._resources}
        bundle = {name: amount for name, amount in needs.items() if amount}
        if not bundle or min(bundle.values()) < 0:
            raise ConfigError(
                f"an engine with {needs} cannot be placed; give positive resources of one node"
            )
        return bundle

    def _reserve(self, bundle: Mapping[str, float], num_engines: int, timeout_s: float) -> None:
        """Reserve `bundle` for each engine. Raises ConfigError if Ray cannot do so within
        `timeout_s`."""
        try:
            self._group = self._ray.util.placement_group(
                [dict(bundle)] * num_engines, strategy=self._strategy
            )
        except ValueError as error:
            raise ConfigError(f"Ray refuses {bundle} with {self._strategy!r}: {error}") from error
        start, seconds = time.monotonic(), 0.0
        while not self._group.wait(min(REMIND_S, timeout_s - seconds)):
            seconds, has = time.monotonic() - start, self._ray.available_resources()
            wanted = f"{num_engines} places with {dict(bundle)}; it has left {has}"
            if seconds >= timeout_s:
                raise ConfigError(
                    f"Ray has not found {wanted} within {timeout_s:g} s; start fewer engines, or "
                    "give them fewer resources"
                )
            _logger.warning("Ray has been looking for %s for %.0f s", wanted, seconds)


class RayEngine:
    """One actor, and the thread that waits for its end. See LaunchedEngine."""

    def __init__(self, name: str, ray: Any, actor: Any, job: EngineJob) -> None:
        self.name, self._ray, self._actor = name, ray, actor
        self._start_timeout_s, self._on_end = job.start_timeout_s, job.on_end
        self.started: Future[None] = Future()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"{name} watch", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        return f"Ray actor {self._actor._actor_id.hex()}"

    def end_restarts(self) -> None:
        """Do not restart the engine after an error of its own. Ray still restarts an actor whose
        process dies, until `terminate`."""
        self._is_ending.set()

    def terminate(self) -> None:
        """Kill the actor for good. The coordinator notices the closed connection."""
        self._is_ending.set()
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)

    kill = terminate

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    # ---- the watching thread

    def _watch(self) -> None:
        try:
            run = self._actor.run.remote()
            self._await_start(run)
        except Exception as error:  # `started` raises it
            self.terminate()
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        try:
            self._await_end(run)
            reason = None
        except Exception as error:  # RayError, or another error once Ray is shut down
            reason = summary_of(error)
        if reason is not None and not self._is_ending.is_set():
            _logger.error("%s (%s) is not started again: %s", self.name, self.place, reason)
        self.terminate()
        self._on_end(self.name, reason)

    def _await_start(self, run: Any) -> None:
        """Wait until the engine is registered. Raises the error that keeps the engine from
        starting."""
        ends = [self._actor.registered.remote(), run]
        done, _ = self._ray.wait(ends, timeout=self._start_timeout_s)
        who = f"{self.name} ({self.place})"
        if not done:
            raise ConfigError(f"{who} did not start within {self._start_timeout_s:g} s")
        try:
            fault = self._ray.get(done[0])
        except self._ray.exceptions.RayError as error:
            raise ConfigError(f"{who} died while it started: {summary_of(error)}") from error
        if fault is not None:
            raise decode_error(fault)

    def _await_end(self, run: Any) -> None:
        """Wait until the engine has ended in order. Raises RayError when Ray stops restarting
        it."""
        # If a process dies, Ray repeats `run` in the next process. An engine that fails by an error
        # leaves its process running. That process is killed so that Ray starts the next one.
        while (fault := self._ray.get(run)) is not None:
            who, error = f"{self.name} ({self.place})", decode_error(fault)
            _logger.warning("%s failed: %s", who, error)
            self._ray.kill(self._actor, no_restart=self._is_ending.is_set())
            run = self._actor.run.remote()


class EngineActor:
    """The class of the Ray actors. `run` runs an engine in the actor's process."""

    def __init__(self, module: str, address: str, stored: list[Any]) -> None:
        """`stored` is a list with the reference to the pickled arguments."""
        # Ray fetches a plain reference, and would hold the arguments here while the actor lives.
        self._module, self._address, (self._stored,) = module, address, stored
        self._has_run, self._is_registered = False, threading.Event()

    def run(self) -> dict[str, Any] | None:
        """Run the engine until it ends. A second call in one process never returns. Returns None if
        the coordinator ended the fleet, else the encoded error that ended the engine."""
        if self._has_run:
            # The engine has failed, and Ray is about to repeat this call in the next process.
            threading.Event().wait()
        self._has_run = True
        return run_to_end(
            self._module,
            self._address,
            lambda: pickle.loads(_imported_ray().get(self._stored)),
            self._is_registered.set,
        )

    def registered(self) -> None:
        """Wait until the fleet has registered the engine. Runs in another thread of the actor than
        `run`."""
        self._is_registered.wait()


def _imported_ray() -> Any:
    """Return the module `ray`. Raises ConfigError if Ray is not installed."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f"RayLauncher needs Ray: pip install 'ray>=2.40' (extra 'ray'); {error}"
        ) from error
    return ray
