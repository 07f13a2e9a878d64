"""Starts the processes of `benchmarks.coordinator`, and measures their requests.

Used by `benchmarks.coordinator`. A fleet is one relay or coordinator process, engine processes and
client processes.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.coordinator_bare import serve_bare_clients, serve_bare_engine, serve_relay
from benchmarks.coordinator_load import Load, Timing
from benchmarks.coordinator_real import serve_real_clients, serve_real_engine
from benchmarks.peers_worker import process_seconds
from rollout.coordinator.coordinator import DataParallelInferenceCoordinator
from rollout.coordinator.core.context import CoordinatorLimits

# relay: bare peers and a relay. bare: bare peers and a coordinator. real: real peers and a
# coordinator.
WAYS = ("relay", "bare", "real")
MAX_CLIENT_PROCESSES = 2
_WAIT_S = 120.0
# Bare peers send no heartbeats.
_LIMITS = CoordinatorLimits(client_lease_s=3600, engine_lease_s=3600, progress_deadline_s=3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Result of one load.

    cpu_s: CPU seconds per request of the relay's or coordinator's process.
    latencies: seconds of each request.
    """

    requests_per_s: float
    cpu_s: float
    latencies: Sequence[float]


class Fleet:
    """The processes of one way to connect: "relay", "bare" or "real".

    Engines reply with `record`, a packed record. The constructor starts all processes.
    """

    def __init__(self, way: str, num_clients: int, num_engines: int, record: bytes) -> None:
        self._starter = multiprocessing.get_context("forkserver")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._clients: list[Connection] = []
        is_relay = {} if way == "real" else {"is_relay": way == "relay"}
        if way == "relay":
            middle = self._start(serve_relay, num_engines)
        else:
            middle = self._start_coordinator(num_engines)
        self._middle_pid = self._processes[0].pid or 0
        address = _answer(middle)
        serve_engine = serve_real_engine if way == "real" else serve_bare_engine
        engines = [
            self._start(serve_engine, address, record, **is_relay) for _ in range(num_engines)
        ]
        for engine in engines:
            _expect(engine, "ready")
        if way == "relay":
            _expect(middle, "ready")
        serve_clients = serve_real_clients if way == "real" else serve_bare_clients
        num_processes = min(num_clients, MAX_CLIENT_PROCESSES)
        for index in range(num_processes):
            num_here = len(range(index, num_clients, num_processes))
            self._clients.append(self._start(serve_clients, address, num_here, **is_relay))
        for client in self._clients:
            _expect(client, "ready")

    def _start(self, serve: Callable[..., None], *arguments: Any, **options: Any) -> Connection:
        """Run `serve` in a new process with one end of a pipe, and return the other end."""
        here, there = self._starter.Pipe()
        process = self._starter.Process(
            target=_serve_quietly, args=(serve, there, *arguments), kwargs=options
        )
        process.start()
        there.close()
        self._processes.append(process)
        self._pipes.append(here)
        return here

    def _start_coordinator(self, num_engines: int) -> Connection:
        self._is_listening = self._starter.Event()  # kept until the process has opened the event
        return self._start(
            DataParallelInferenceCoordinator.entrypoint,
            *(self._is_listening, num_engines, None),
            limits=_LIMITS,
        )

    def measure(self, load: Load) -> Measurement:
        """Let the clients run a load, and return its figures. Raises RuntimeError if a process
        is silent."""
        for client in self._clients:
            client.send(load)
        for client in self._clients:
            _expect(client, "prepared")
        cpu_before = process_seconds(self._middle_pid)
        for client in self._clients:
            client.send("go")
        timings: list[Timing] = [_answer(client) for client in self._clients]
        cpu_s = process_seconds(self._middle_pid) - cpu_before
        latencies = [latency for timing in timings for latency in timing.latencies]
        seconds = max(t.end for t in timings) - min(t.start for t in timings)
        return Measurement(
            requests_per_s=len(latencies) / seconds,
            cpu_s=cpu_s / len(latencies),
            latencies=latencies,
        )

    def close(self) -> None:
        """End all processes: first the clients and engines, then the relay or coordinator."""
        for pipe in reversed(self._pipes):
            pipe.close()
        for process in reversed(self._processes):
            if process.pid == self._middle_pid:
                process.terminate()
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def fleets(num_clients: int, num_engines: int, record: bytes) -> Iterator[dict[str, Fleet]]:
    """Yield a running fleet for each way in WAYS. Ends all fleets when the context ends."""
    with contextlib.ExitStack() as stack:
        made: dict[str, Fleet] = {}
        for way in WAYS:
            made[way] = Fleet(way, num_clients, num_engines, record)
            stack.callback(made[way].close)
        yield made


def _serve_quietly(serve: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Run `serve`, and log only errors of `rollout`."""
    logging.getLogger("rollout").setLevel(logging.ERROR)
    serve(*arguments, **options)


def preload() -> None:
    """Make the fork server import this module once, which saves seconds per process."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])


def _answer(pipe: Connection) -> Any:
    """Return the next message of a process. Raises RuntimeError after _WAIT_S seconds."""
    if not pipe.poll(_WAIT_S):
        raise RuntimeError(f"a process of the benchmark sent nothing for {_WAIT_S:g} s")
    return pipe.recv()


def _expect(pipe: Connection, word: str) -> None:
    """Receive a message. Raises RuntimeError if the message is not `word`."""
    answer = _answer(pipe)
    if answer != word:
        raise RuntimeError(f"a process of the benchmark sent {answer!r}, expected {word!r}")
