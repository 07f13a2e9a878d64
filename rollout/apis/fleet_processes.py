"""FleetProcesses: the processes of a coordinator and its engines, and their certain end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from rollout.config import DEFAULT_MAX_REQUESTS, InferenceConfig
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.engine_side.agent import EngineAgent
from rollout.coordinator.engine_side.link import EngineLink
from rollout.coordinator.engine_side.serve import serve
from rollout.coordinator.publisher import fetch_weights
from rollout.engine.build import DynamicInferenceEngine
from rollout.errors import ConfigError, EngineStateError
from rollout.text import Tokenizer

_logger = logging.getLogger(__name__)
# A clean interpreter each: torch's threads and CUDA do not survive a fork.
_PROCESSES = multiprocessing.get_context("spawn")
_START_S, _REGISTER_S, _END_S = 120.0, 60.0, 10.0


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
    ) -> None:
        if data_parallel_size < 1:
            raise ConfigError(f"data_parallel_size={data_parallel_size} must be at least 1")
        self._processes: list[BaseProcess] = []
        try:
            self.address = self._start_coordinator(recipe, data_parallel_size, host, port)
            self._start_engines(recipe, data_parallel_size)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The coordinator's process, then those of the engines."""
        return [process.pid for process in self._processes if process.pid is not None]

    def _start_coordinator(
        self, recipe: EngineRecipe, data_parallel_size: int, host: str | None, port: int | None
    ) -> str:
        ours, theirs = _PROCESSES.Pipe()
        ready = _PROCESSES.Event()
        config = recipe.config
        arguments = {
            "pipe_connection": theirs,
            "ready_event": ready,
            "data_parallel_size": data_parallel_size,
            "tokenizer": recipe.tokenizer,
            "inference_coordinator_port": port,
            "block_size_tokens": config.block_size_tokens,
            "enable_prefix_caching": config.enable_prefix_caching,
            **({} if host is None else {"host": host}),
        }
        self._spawn("coordinator", _run_coordinator, (arguments,))
        theirs.close()
        return str(self._first_word(ours, "the coordinator"))

    def _start_engines(self, recipe: EngineRecipe, count: int) -> None:
        pipes = []
        for rank in range(count):
            ours, theirs = _PROCESSES.Pipe(duplex=False)
            threads = recipe.config.num_threads or max(1, (os.cpu_count() or 1) // count)
            self._spawn(f"engine {rank}", _run_engine, (self.address, recipe, threads, theirs))
            theirs.close()
            pipes.append(ours)
        for rank, pipe in enumerate(pipes):
            self._first_word(pipe, f"engine {rank}")

    def _spawn(self, name: str, target: Any, arguments: Sequence[Any]) -> None:
        process = _PROCESSES.Process(
            target=target, args=tuple(arguments), name=f"rollout {name}", daemon=True
        )
        process.start()
        self._processes.append(process)

    def _first_word(self, pipe: Connection, who: str) -> Any:
        """What a process says when it is ready. Raises what it sends, ConfigError if it dies."""
        with pipe:
            if not wait([pipe], timeout=_START_S):
                raise ConfigError(f"{who} did not start within {_START_S:g} s")
            try:
                word = pipe.recv()
            except EOFError:
                raise ConfigError(f"{who} died while it started; its log says why") from None
        if isinstance(word, Exception):
            raise word
        return word

    def check(self) -> None:
        """Raise EngineStateError if all engines are gone."""
        if not any(process.is_alive() for process in self._processes[1:]):
            raise EngineStateError("all engine processes have ended")

    def close(self) -> None:
        """End what still runs: asked first, then killed. Twice is fine."""
        deadline = time.monotonic() + _END_S
        for process in reversed(self._processes):
            process.join(max(0.0, min(1.0, deadline - time.monotonic())))
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes = []


# ---- in the processes


def _run_coordinator(arguments: dict[str, Any]) -> None:
    _end_with_the_parent()
    DataParallelInferenceCoordinator.entrypoint(**arguments)


def _run_engine(address: str, recipe: EngineRecipe, num_threads: int, pipe: Connection) -> None:
    _end_with_the_parent()
    with pipe:
        try:
            config = recipe.config.replace(num_threads=num_threads)
            engine = DynamicInferenceEngine.from_model(
                recipe.model, config, recipe.tokenizer, recipe.weights_version
            )
            agent = EngineAgent(
                engine,
                engine_id=uuid.uuid4().bytes,
                block_size_tokens=config.block_size_tokens,
                max_requests=config.max_requests or DEFAULT_MAX_REQUESTS,
                fetch=fetch_weights,
            )
            link = EngineLink(address, registration=agent.registration, status=agent.status)
            link.wait_registered(_REGISTER_S)
        except Exception as error:
            with contextlib.suppress(Exception):
                pipe.send(error)
            raise
        pipe.send("ready")
    with link:
        serve(agent, link)


def _end_with_the_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it does, also if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
