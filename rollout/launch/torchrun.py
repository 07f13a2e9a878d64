"""TorchrunLauncher: rank 0 of torchrun is the trainer, and every other rank runs one engine.

In rank 0, users or `rollout train` with `launcher=torchrun` give the launcher to AsyncLLM. In the
other ranks, `trainer_hooks.train.main` or a user's script calls `serve_engines`.

torchrun's store listens on all addresses without authentication. So the store carries only names of
files, and a private folder that all ranks see holds the engines' arguments and keys.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from rollout.addresses import resolve_host
from rollout.backends.cpu.user_cache import private_folder
from rollout.backends.limits import num_usable_cpus
from rollout.child_process import pickled
from rollout.errors import ConfigError
from rollout.launch.launcher import EngineJob
from rollout.launch.local import LocalLauncher
from rollout.launch.private_files import PrivateFolder
from rollout.parallel.stores import connect_store, open_store

_logger = logging.getLogger(__name__)
_FOREVER = timedelta(days=365)
_STORE_S = 300.0  # time limit to reach the store, as in torch
_NUM_COMMANDS, _COMMAND = "rollout/num_commands", "rollout/command"
FOLDER_VARIABLE = "ROLLOUT_TORCHRUN_FOLDER"


class _Command(msgspec.Struct, frozen=True):
    """A message that rank 0 puts into the store. `file` names the file in the private folder with
    the pickled `_Start`, or is None when rank 0 ends."""

    file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The arguments with which a rank starts its engine. `arguments` is pickled."""

    module: str
    arguments: bytes
    num_gpus: int
    address: str
    max_restarts: int
    start_timeout_s: float


class TorchrunLauncher:
    """The launcher of rank 0. Every other rank calls `serve_engines`. Each rank restarts its own
    engine, at most `max_restarts` times in a row. A rank that ends with an error ends the whole
    job, as in any torchrun job. The launcher does not supervise the engines."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """Connect to torchrun's store, and make the private folder.

        `folder` is on a file system that all ranks see. None takes the folder in the environment
        variable ROLLOUT_TORCHRUN_FOLDER, or a folder in the user's cache directory if the variable
        is not set. `serve_engines` must get the same folder. Raises ConfigError if this is not rank
        0, if there is only one rank, or if other users can write the folder."""
        rank, self._num_ranks = _rank(), int(os.environ.get("WORLD_SIZE", "1"))
        if rank or self._num_ranks < 2:
            raise ConfigError(
                f"this is rank {rank} of {self._num_ranks}: TorchrunLauncher is for rank 0 of "
                "torchrun, and needs at least one other rank, which calls serve_engines()"
            )
        self._folder = _private_folder(folder)
        self._store = _store()
        self._files: list[str] = []
        atexit.register(self._end)

    @property
    def host(self) -> str:
        """Return MASTER_ADDR, the address at which the other ranks reach rank 0."""
        return os.environ["MASTER_ADDR"]

    def num_threads(self, num_engines: int) -> None:
        """Return None: each rank divides its machine's processors among the ranks there."""
        return None

    def launch(self, job: EngineJob, num_engines: int) -> list[Any]:
        """Send the arguments to the other ranks once the coordinator's address is known. Returns
        []. Raises ConfigError unless there is one rank for each engine besides rank 0."""
        if num_engines != self._num_ranks - 1:
            raise ConfigError(
                f"{num_engines} engines are to start, and torchrun has {self._num_ranks - 1} ranks "
                f"besides rank 0; start {num_engines + 1} ranks"
            )
        arguments = pickled(dict(job.arguments), "the model, its tokenizer or its config")
        of_start: Mapping[str, Any] = {
            "module": job.module,
            "arguments": arguments,
            "num_gpus": job.num_gpus,
            "max_restarts": job.max_restarts,
            "start_timeout_s": job.start_timeout_s,
        }

        def send_start(address: Future[str]) -> None:
            if address.exception() is None:
                start = pickle.dumps(_Start(**of_start, address=address.result()))
                self._files.append(self._folder.write("engine", start))
                self._send(_Command(file=self._files[-1]))

        job.address.add_done_callback(send_start)
        return []

    def close(self) -> None:
        """Remove the files with the engines' arguments. The other ranks then wait for the next
        fleet or for the end of rank 0."""
        while self._files:
            self._folder.remove(self._files.pop())

    def _end(self) -> None:
        """Make `serve_engines` return in the other ranks. Called when this process exits."""
        self.close()
        with suppress(RuntimeError):  # the store may have ended before
            self._send(_Command(file=None))

    def _send(self, command: _Command) -> None:
        number = self._store.add(_NUM_COMMANDS, 1)
        self._store.set(f"{_COMMAND}/{number}", msgspec.msgpack.encode(command))


def serve_engines(folder: str | Path | None = None) -> bool:
    """Run an engine for each fleet that rank 0 makes. Returns True once rank 0 ends.

    In rank 0, return False at once. `folder` is the folder given to TorchrunLauncher. Raises
    ConfigError for a folder or file that other users own or can write. Raises the error that keeps
    an engine from starting."""
    if not _rank():
        return False
    private, store, number = _private_folder(folder), _store(), 1
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    while True:
        key = f"{_COMMAND}/{number}"
        store.wait([key], _FOREVER)
        file = _decoded(store.get(key)).file
        if file is None:
            return True
        _serve(pickle.loads(private.read(file)), devices)
        number += 1


def _decoded(encoded: bytes) -> _Command:
    try:
        return msgspec.msgpack.decode(encoded, type=_Command)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"torchrun's store holds a malformed command: {error}; start the job again"
        ) from error


def _private_folder(folder: str | Path | None) -> PrivateFolder:
    chosen = folder or os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return PrivateFolder(chosen)
    try:
        return PrivateFolder(private_folder("torchrun"))
    except OSError as error:
        raise ConfigError(f"{error}; name one by {FOLDER_VARIABLE}") from error


def _serve(start: _Start, devices: str | None) -> None:
    """Run one engine, with its restarts, until its fleet ends or no restart is left.

    `devices` is CUDA_VISIBLE_DEVICES as torchrun set it for the ranks of this machine, or None. If
    the engine has GPUs, sets the variable to this rank's own devices. Raises the error that keeps
    the engine from starting."""
    arguments = pickle.loads(start.arguments)
    if (config := arguments.get("inference_config")) is not None:
        threads = max(1, num_usable_cpus() // _num_local_ranks())
        arguments["inference_config"] = config.replace(num_threads=config.num_threads or threads)
    if start.num_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_own_gpus(start.num_gpus, devices))
    address: Future[str] = Future()
    address.set_result(start.address)
    job = EngineJob(
        module=start.module,
        arguments=arguments,
        num_gpus=start.num_gpus,
        address=address,
        max_restarts=start.max_restarts,
        start_timeout_s=start.start_timeout_s,
        on_end=lambda name, reason: _logger.info(
            "%s has ended: %s", name, reason or "orderly stop"
        ),
    )
    (engine,) = LocalLauncher().launch(job, 1)
    engine.started.result()
    engine.join()


def _own_gpus(num_gpus: int, seen: str | None) -> list[str]:
    """Return this rank's `num_gpus` devices of the comma-separated devices in `seen`. The ranks of
    a machine take devices in the order of their local ranks. Without `seen` the devices are 0, 1,
    ..."""
    first = int(os.environ["LOCAL_RANK"]) * num_gpus
    devices = seen.split(",") if seen else [str(i) for i in range(first + num_gpus)]
    return devices[first : first + num_gpus]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _store() -> Any:
    """Connect to the store at MASTER_ADDR and return it. Rank 0 starts it unless torchrun's agent
    has. Raises ConfigError if rank 0 cannot listen there."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if _rank() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return connect_store(host, port, _STORE_S)
    try:
        return open_store(resolve_host(host), _STORE_S, port)[0]
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at MASTER_ADDR={host}, MASTER_PORT={port}: {error}"
        ) from error
