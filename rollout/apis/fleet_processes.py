"""FleetProcesses: the processes of a coordinator and its engines, and their certain end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rollout.apis.clean_process import mentions_main, needs_main, start_clean_process
from rollout.apis.engine_process import run_engine
from rollout.backends.limits import num_usable_cpus
from rollout.config import InferenceConfig
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.dealer import LOOPBACK
from rollout.coordinator.routing.policies import find_policy
from rollout.coordinator.security import CurveKeys, remove_private_address
from rollout.errors import ConfigError, EngineStateError
from rollout.text import Tokenizer

_logger = logging.getLogger(__name__)
_START_S, _LEAVE_S, _END_S = 120.0, 5.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """All that an engine's process needs."""

    model: Any
    config: InferenceConfig
    tokenizer: Tokenizer | None
    weights_version: int


class FleetProcesses:
    """Started when it is made. Raises ConfigError with the reason if a process does not start."""

    def __init__(
        self,
        recipe: EngineRecipe,
        *,
        data_parallel_size: int,
        host: str | None = None,
        port: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`options`: further arguments of DataParallelInferenceCoordinator."""
        if data_parallel_size < 1:
            raise ConfigError(f"data_parallel_size={data_parallel_size} must be at least 1")
        self._processes: list[BaseProcess] = []
        self.address = ""
        self.curve: CurveKeys | None = None  # of the fleet's own engines and client
        try:
            # All at once: most of a start is imports, which need no address.
            arguments = _arguments_for_coordinator(recipe.config, options or {})
            arguments |= {
                "data_parallel_size": data_parallel_size,
                "tokenizer": recipe.tokenizer,
                "inference_coordinator_port": port,
                # Over TCP only if the user says where.
                "host": LOOPBACK if host is None and port is not None else host,
            }
            if "curve" in arguments:
                arguments["curve"], self.curve = arguments["curve"].with_client()
            coordinator = self._start(
                "coordinator", _coordinator_process, arguments, imports_main=needs_main(arguments)
            )
            engines = self._start_engines(recipe, data_parallel_size)
            with coordinator:
                self.address = str(_word_of("the coordinator", coordinator))
            for engine in engines:
                # One that died on its way says so below.
                with contextlib.suppress(BrokenPipeError):
                    engine.send(self.address)
            for rank, engine in enumerate(engines):
                with engine:
                    _word_of(f"engine {rank}", engine)
        except BaseException:
            self.close(asked=False)
            raise

    @property
    def pids(self) -> list[int]:
        """The coordinator's process, then those of the engines."""
        return [process.pid for process in self._processes if process.pid is not None]

    def _start_engines(self, recipe: EngineRecipe, count: int) -> list[Connection]:
        threads = recipe.config.num_threads or max(1, num_usable_cpus() // count)
        # Pickled here, tensors are copied; multiprocessing would have all processes write to the
        # same ones.
        pickled = pickle.dumps((recipe, self.curve))
        imports_main = mentions_main(pickled)
        return [
            self._start(
                f"engine {rank}", _engine_process, pickled, threads, imports_main=imports_main
            )
            for rank in range(count)
        ]

    def _start(self, name: str, run: Any, *arguments: Any, imports_main: bool) -> Connection:
        """Start a process, which gets the other end of the pipe that is returned."""
        with _no_interrupt():
            process, pipe = start_clean_process(
                run, *arguments, name=f"rollout {name}", imports_main=imports_main
            )
        self._processes.append(process)
        return pipe

    def check(self) -> None:
        """Raise EngineStateError if all engines are gone."""
        if not any(process.is_alive() for process in self._processes[1:]):
            raise EngineStateError("all engine processes have ended")

    def close(self, *, asked: bool = True) -> None:
        """End what still runs. `asked`: they were told to end, and may take a moment for it.

        Twice is fine.
        """
        if asked:
            self._join(_LEAVE_S)
        for process in self._processes:
            process.terminate()
        self._join(_END_S)
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._processes = []
        remove_private_address(self.address)  # a coordinator that was killed has left it

    def _join(self, timeout_s: float) -> None:
        """Wait for all of them, not for each."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))


def _arguments_for_coordinator(
    config: InferenceConfig, options: Mapping[str, Any]
) -> dict[str, Any]:
    """What the engines' config says, and `options`. Raises ConfigError."""
    policy = options.get(
        "prefix_caching_coordinator_policy", config.prefix_caching_coordinator_policy
    )
    if type(policy) is str:
        # Looked up here: what this process has registered is unknown in another one.
        policy = find_policy(policy)
    return {
        "block_size_tokens": config.block_size_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        **options,
        "prefix_caching_coordinator_policy": policy,
    }


def _word_of(who: str, pipe: Connection) -> Any:
    """What a process says when it is ready. Raises what it sends, ConfigError if it dies."""
    if not wait([pipe], timeout=_START_S):
        raise ConfigError(f"{who} did not start within {_START_S:g} s")
    try:
        word = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise ConfigError(f"{who} died while it started; its log says why") from None
    if isinstance(word, Exception):
        raise word
    return word


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """A process started meanwhile begins deaf to Ctrl-C, which is its parent's to answer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the processes


def _coordinator_process(pipe: Connection, arguments: dict[str, Any]) -> None:
    _end_with_the_parent()
    with pipe, _told(pipe):
        DataParallelInferenceCoordinator.entrypoint(pipe, threading.Event(), **arguments)


def _engine_process(pipe: Connection, pickled: bytes, num_threads: int) -> None:
    _end_with_the_parent()
    with pipe, _told(pipe):
        recipe, curve = pickle.loads(pickled)
        run_engine(
            pipe.recv(),
            recipe.model,
            recipe.tokenizer,
            recipe.config.replace(num_threads=num_threads),
            recipe.weights_version,
            curve=curve,
            on_registered=partial(pipe.send, "ready"),
        )


@contextlib.contextmanager
def _told(pipe: Connection) -> Iterator[None]:
    """The parent hears what keeps a process from starting; later it does not listen any more."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            pipe.send(error)
        raise


def _end_with_the_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it does, also if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)  # the coordinator removes its socket's directory
        time.sleep(_END_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
