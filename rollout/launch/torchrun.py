"""TorchrunLauncher: rank 0 of torchrun is the trainer, every other rank looks after one engine.

What engines are given goes through torchrun's own store, as torch sends objects between ranks:
pickled, and as safe as the network of that job is.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from rollout.backends.limits import num_usable_cpus
from rollout.child_process import pickled
from rollout.errors import ConfigError
from rollout.launch.launcher import EngineJob
from rollout.launch.local import LocalLauncher

_logger = logging.getLogger(__name__)
_MAX_ARGUMENTS_BYTES = 64 << 20
_FOREVER = timedelta(days=365)
_NUM_ORDERS, _ORDER = "rollout/num_orders", "rollout/order"
_END = b"end"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What the other ranks are told to start. `arguments`: pickled."""

    module: str
    arguments: bytes
    num_gpus: int
    address: str
    max_restarts: int
    start_timeout_s: float


class TorchrunLauncher:
    """For rank 0; all others call `serve_engines`. They are not watched here.

    Each rank starts its engine again, so often in a row. A rank that ends with an error ends the
    whole job, as torchrun does.
    """

    def __init__(self) -> None:
        """Raises ConfigError unless this is rank 0 of a torchrun with at least two."""
        rank, self._num_ranks = _rank(), int(os.environ.get("WORLD_SIZE", "1"))
        if rank or self._num_ranks < 2:
            raise ConfigError(
                f"this is rank {rank} of {self._num_ranks}: TorchrunLauncher is for rank 0 of "
                "torchrun, and the others, at least one, call serve_engines()"
            )
        self._store = _store()
        atexit.register(self._tell, _END)

    @property
    def host(self) -> str:
        """The address at which the other ranks have found this one."""
        return os.environ["MASTER_ADDR"]

    def num_threads(self, num_engines: int) -> None:
        """Each rank shares its machine's processors with the other ranks there."""
        return None

    def launch(self, job: EngineJob, num_engines: int) -> list[Any]:
        """See Launcher. Raises ConfigError if there is not one rank for each engine, and if the
        model is too large to be sent."""
        if num_engines != self._num_ranks - 1:
            raise ConfigError(
                f"{num_engines} engines are wanted, and torchrun has {self._num_ranks - 1} ranks "
                f"besides rank 0; start {num_engines + 1} ranks"
            )
        arguments = pickled(dict(job.arguments), "the model, its tokenizer or its config")
        if len(arguments) > _MAX_ARGUMENTS_BYTES:
            raise ConfigError(
                f"the model has {len(arguments) >> 20} MiB, torchrun's store takes "
                f"{_MAX_ARGUMENTS_BYTES >> 20}: name it by a directory that all nodes see"
            )
        of_order: Mapping[str, Any] = {
            "module": job.module,
            "arguments": arguments,
            "num_gpus": job.num_gpus,
            "max_restarts": job.max_restarts,
            "start_timeout_s": job.start_timeout_s,
        }

        def tell(address: Future[str]) -> None:
            if address.exception() is None:
                self._tell(pickle.dumps(_Order(**of_order, address=address.result())))

        job.address.add_done_callback(tell)
        return []

    def close(self) -> None:
        """Engines end with their fleet; their ranks wait for the next one, or this one's end."""

    def _tell(self, order: bytes) -> None:
        number = self._store.add(_NUM_ORDERS, 1)
        self._store.set(f"{_ORDER}/{number}", order)  # type: ignore[arg-type] # bytes are taken


def serve_engines() -> bool:
    """Return False on rank 0. On every other one, be an engine of each fleet that rank 0 makes, and
    return True once rank 0 ends.

    Raises what keeps an engine from starting.
    """
    if not _rank():
        return False
    store, number = _store(), 1
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    while True:
        key = f"{_ORDER}/{number}"
        store.wait([key], _FOREVER)
        told = store.get(key)
        if told == _END:
            return True
        _serve(pickle.loads(told), devices)
        number += 1


def _serve(order: _Order, devices: str | None) -> None:
    """Run one engine, with its restarts, until its fleet ends or it is given up. `devices`: those
    that all ranks of this node see; None for all."""
    arguments = pickle.loads(order.arguments)
    if (config := arguments.get("inference_config")) is not None:
        threads = max(1, num_usable_cpus() // _num_local_ranks())
        arguments["inference_config"] = config.replace(num_threads=config.num_threads or threads)
    if order.num_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_own_gpus(order.num_gpus, devices))
    address: Future[str] = Future()
    address.set_result(order.address)
    job = EngineJob(
        module=order.module,
        arguments=arguments,
        num_gpus=order.num_gpus,
        address=address,
        max_restarts=order.max_restarts,
        start_timeout_s=order.start_timeout_s,
        on_end=lambda name, reason: _logger.info("%s has ended: %s", name, reason or "as told"),
    )
    (engine,) = LocalLauncher().launch(job, 1)
    engine.started.result()
    engine.join()


def _own_gpus(num_gpus: int, seen: str | None) -> list[str]:
    """The devices of this rank, of those that its node's ranks see: so many for each, in order."""
    first = int(os.environ["LOCAL_RANK"]) * num_gpus
    devices = seen.split(",") if seen else [str(i) for i in range(first + num_gpus)]
    return devices[first : first + num_gpus]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _num_local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _store() -> Store:
    """The store that torchrun has started, or the one that rank 0 starts without its agent."""
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not is_of_agent and not _rank(),
        wait_for_workers=False,
    )
