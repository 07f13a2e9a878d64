"""Starts an engine's ranks: as child processes of rank 0, or in the processes of a trainer.

Used by `rollout.engine.build`. `rollout.tensor_parallel.rank_process` runs `run_rank` in child
processes. `rollout.apis.spmd` calls `num_spmd_ranks`. The module starts processes and opens
sockets.

The ranks of a trainer exchange addresses once, over the trainer's process group `pg_collection.tp`.
Afterwards commands go over local sockets, which also show that a rank has ended. Collectives go
over shared memory or a communicator of the engine's own, so that a failed collective does not break
the trainer's group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from rollout.backends.group_bytes import all_gather_bytes
from rollout.backends.limits import num_usable_cpus
from rollout.backends.process_groups import RankRendezvous
from rollout.backends.select import device_of, use_device
from rollout.child_process import ChildProcess, pickled
from rollout.config import InferenceConfig
from rollout.errors import ConfigError, LockstepError, RolloutError, decode_error, encode_error
from rollout.models.checkpoints.loading import spec_of, without_shards
from rollout.parallel.channel import FollowerChannel, LeadChannel
from rollout.parallel.wire import RankListener, SocketWire, this_machine, wire_to_lead
from rollout.tensor_parallel.executor import SpmdExecutor, TensorParallelExecutor, end_processes
from rollout.tensor_parallel.follower import Follower, FollowerStart, SpmdFollower
from rollout.worker.loading import EngineSizes, LoadedModel, load_model, runner_of, sizes_of
from rollout.worker.worker import Worker

logger = logging.getLogger(__name__)

Model = str | Path | nn.Module | Any
_RANK_MODULE = "rollout.tensor_parallel.rank_process"


def load_on_ranks(
    model: Model,
    config: InferenceConfig,
    weights_version: int,
    rendezvous: RankRendezvous,
    channel: LeadChannel,
) -> tuple[LoadedModel, EngineSizes, Worker]:
    """Load the model on all ranks, from rank 0. The other ranks must run a FollowerStart. Returns
    rank 0's loaded model, the engine's sizes, which fit all ranks, and rank 0's Worker. Raises a
    ConfigError or ModelError of any rank, and LockstepError if a rank ends."""
    start_s = config.tensor_parallel_start_timeout_s
    joined = channel.send(FollowerStart.join_ranks)
    collectives = rendezvous.collectives(
        0, timeout_s=config.tensor_parallel_timeout_s, check=channel.check
    )
    # The rendezvous stays open until all ranks have joined, whatever fails then.
    channel.results(joined, start_s)
    rendezvous.close()
    is_loaded = channel.send(FollowerStart.load)
    loaded = load_model(model, config, weights_version, collectives)
    channel.results(is_loaded, start_s)
    loaded.model.prepare(loaded.backend)
    num_blocks = channel.results(channel.send(FollowerStart.prepare), start_s)
    sizes, least = loaded.sizes, min(loaded.sizes.num_blocks, *num_blocks)
    if least < sizes.num_blocks:
        sizes = sizes_of(loaded.config, loaded.backend, loaded.model, least)
    has_begun = channel.send(FollowerStart.begin, sizes)
    worker = Worker(*runner_of(loaded, sizes), loaded.weights, collectives)
    channel.results(has_begun, start_s)
    return loaded, sizes, worker


def _rendezvous(config: InferenceConfig, address: str | None = None) -> RankRendezvous:
    """Open the rendezvous of an engine's ranks, or join it at `address`."""
    return RankRendezvous(
        device_of(config),
        config.tensor_parallel_size,
        address,
        timeout_s=config.tensor_parallel_start_timeout_s,
    )


# ---- child processes


def start_group(
    model: Model, config: InferenceConfig, weights_version: int
) -> tuple[LoadedModel, EngineSizes, TensorParallelExecutor]:
    """Start the other ranks as child processes of this process, and load the model on all ranks.
    This process is rank 0. Raises the errors of `load_on_ranks`. No child process is left then."""
    config = _sharing_cpus(config)
    size, timeout_s = config.tensor_parallel_size, config.tensor_parallel_timeout_s
    spec_of(model, config.dtype).local(0, size)  # refuses a model before any process starts
    children: list[ChildProcess] = []
    with contextlib.ExitStack() as undo:
        undo.callback(end_processes, children)
        for _ in range(1, size):
            children.append(ChildProcess(_RANK_MODULE))  # one by one: an error ends those started
        # Metrics writers and the like belong to rank 0 alone.
        of_followers = config.replace(metrics_writer=None, logging_step_interval=0)
        sent = pickled(
            (without_shards(model, config.dtype), of_followers, weights_version),
            "the model or its config",
        )
        rendezvous = _rendezvous(config)
        undo.callback(rendezvous.close)
        for rank, child in enumerate(children, start=1):
            child.send(pickle.dumps((rank, rendezvous.address)), sent)
        del sent
        for child in children:
            child.receive(config.tensor_parallel_start_timeout_s)
        names = [f"rank {rank} (process {c.pid})" for rank, c in enumerate(children, start=1)]
        wires = [_wires_to(child) for child in children]
        channel, staging = (
            LeadChannel(dict(zip(names, each, strict=True)), timeout_s=timeout_s)
            for each in zip(*wires, strict=True)
        )
        loaded, sizes, worker = load_on_ranks(model, config, weights_version, rendezvous, channel)
        executor = TensorParallelExecutor(
            worker, channel=channel, staging=staging, processes=children
        )
        undo.pop_all()
    logger.info("tensor parallel: rank 0 of %d, with %s", size, ", ".join(names))
    return loaded, sizes, executor


def run_rank(
    pipe: Connection, place: tuple[int, str], given: tuple[Model, InferenceConfig, int]
) -> None:
    """Run a rank other than 0 in a child process of `start_group`, until rank 0 ends. `pipe`
    connects to rank 0's process. `place` holds the rank and the address of the rendezvous. `given`
    holds the model, its config and the weights version."""
    (rank, address), (model, config, weights_version) = place, given
    use_device(config, rank)
    rendezvous = _rendezvous(config, address)
    pipe.send("ready")
    wire = SocketWire(socket.socket(fileno=os.dup(pipe.fileno())))
    staging = SocketWire(wire.receive_socket(config.tensor_parallel_start_timeout_s))
    channel, staging_channel = FollowerChannel(rank, wire), FollowerChannel(rank, staging)
    start = FollowerStart(
        # No deadline: rank 0 has one for each rank, and this process ends with rank 0.
        join=lambda: rendezvous.collectives(rank, timeout_s=math.inf),
        load=partial(load_model, model, config, weights_version),
        make=lambda loaded, sizes: Follower(loaded, sizes, staging_channel),
    )
    follower = start.serve(channel)
    del start, model, given  # tensors that the loaded model does not need
    follower.serve(channel)


def _sharing_cpus(config: InferenceConfig) -> InferenceConfig:
    """Return the config with `num_threads` set so that ranks on a CPU share its processors. A given
    `num_threads` stays."""
    if config.num_threads is not None or device_of(config) != "cpu":
        return config
    return config.replace(num_threads=max(1, num_usable_cpus() // config.tensor_parallel_size))


def _wires_to(child: ChildProcess) -> tuple[SocketWire, SocketWire]:
    """Return rank 0's two wires to a child: over the child's pipe, and over a new socket."""
    first = SocketWire(socket.socket(fileno=os.dup(child.pipe.fileno())))
    child.pipe.close()
    ours, theirs = socket.socketpair()
    with theirs:
        first.send_socket(theirs)
    return first, SocketWire(ours)


# ---- processes of a trainer

# Config fields that may differ between ranks.
_OWN_FIELDS = ("metrics_writer", "logging_step_interval", "pg_collection", "num_threads")


def num_spmd_ranks(config: InferenceConfig) -> int:
    """Return how many processes of a trainer run an engine of `config`, or 1 without
    `pg_collection`."""
    return 1 if config.pg_collection is None else int(config.pg_collection.tp.size())


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The message that each rank of a trainer sends the others before the start.

    `settings`: config fields that must be equal on all ranks, as text by name.
    `rendezvous`: rank 0's address for collectives.
    `listener`: rank 0's address for commands.
    `error`: encoded error that keeps the rank from taking part. The other fields are then empty."""

    machine: str = ""
    pid: int = 0
    settings: dict[str, str] = {}
    error: dict[str, Any] | None = None
    rendezvous: str = ""
    listener: bytes = b""


def join_as_lead(
    model: Model, config: InferenceConfig, weights_version: int
) -> tuple[LoadedModel, EngineSizes, SpmdExecutor]:
    """Become rank 0 of `config.pg_collection.tp`, and load the model on all ranks. Raises
    ConfigError on all ranks if their settings differ, LockstepError if the exchange of addresses
    fails, and the errors of `load_on_ranks`."""
    group, config = config.pg_collection.tp, _of_spmd_rank(config)
    size, start_s = config.tensor_parallel_size, config.tensor_parallel_start_timeout_s
    with contextlib.ExitStack() as stack:
        facts = _Facts()
        try:
            listener = RankListener()
            stack.callback(listener.close)
            rendezvous = _rendezvous(config)
            stack.callback(rendezvous.close)
            facts = _own_facts(config, weights_version, rendezvous.address, listener.address)
        except (RolloutError, OSError) as error:
            facts = _Facts(error=encode_error(error))
        all_facts = _exchanged(group, facts)
        names = [f"rank {rank} (process {all_facts[rank].pid})" for rank in range(1, size)]
        wires = dict(zip(names, listener.wires(size, start_s), strict=True))
        channel = LeadChannel(wires, timeout_s=config.tensor_parallel_timeout_s)
        with _errors_sent_to(channel):
            loaded, sizes, worker = load_on_ranks(
                model, config, weights_version, rendezvous, channel
            )
        executor = SpmdExecutor(worker, channel=channel, start_timeout_s=start_s)
    return loaded, sizes, executor


def join_as_follower(model: Model, config: InferenceConfig, weights_version: int) -> SpmdFollower:
    """Become a rank of `config.pg_collection.tp` other than 0, and load its part of the model.
    Returns when the rank has started. Raises the errors of `join_as_lead`."""
    group, config = config.pg_collection.tp, _of_spmd_rank(config)
    rank, start_s = group.rank(), config.tensor_parallel_start_timeout_s
    lead, *_ = _exchanged(group, _own_facts(config, weights_version))
    channel = FollowerChannel(rank, wire_to_lead(lead.listener, rank, start_s))
    try:
        timeout_s = config.tensor_parallel_timeout_s
        rendezvous = _rendezvous(config, lead.rendezvous)
        start = FollowerStart(
            join=lambda: rendezvous.collectives(rank, timeout_s=timeout_s, check=channel.check),
            load=partial(load_model, model, config, weights_version),
            make=lambda loaded, sizes: SpmdFollower(rank, loaded, sizes, channel),
        )
        return start.serve(channel, start_s)
    except BaseException as error:
        channel.leave(f"it could not start: {error!r}")
        raise


def _of_spmd_rank(config: InferenceConfig) -> InferenceConfig:
    return config.replace(tensor_parallel_size=num_spmd_ranks(config), pg_collection=None)


def _own_facts(
    config: InferenceConfig, weights_version: int, rendezvous: str = "", listener: bytes = b""
) -> _Facts:
    shared = [f.name for f in dataclasses.fields(config) if f.name not in _OWN_FIELDS]
    settings = {name: repr(getattr(config, name)) for name in shared}
    try:
        return _Facts(
            machine=this_machine(),
            pid=os.getpid(),
            settings={**settings, "weights_version": repr(weights_version)},
            rendezvous=rendezvous,
            listener=listener,
        )
    except OSError as error:
        return _Facts(error=encode_error(error))


def _exchanged(group: Any, own: _Facts) -> Sequence[_Facts]:
    """Exchange facts with all ranks, and return all facts in the order of ranks. Raises the error
    of any rank on all ranks, ConfigError if settings differ, and LockstepError if the exchange
    fails."""
    try:
        gathered = all_gather_bytes(group, msgspec.msgpack.encode(own))
    except (RuntimeError, ValueError) as error:  # whatever the group's library raises
        raise LockstepError(f"the rendezvous of pg_collection.tp failed: {error}") from error
    facts = [msgspec.msgpack.decode(each, type=_Facts) for each in gathered]
    for rank, each in enumerate(facts):
        if each.error is not None:
            raise decode_error({**each.error, "message": f"rank {rank}: {each.error['message']}"})
    _check_alike(facts)
    return facts


def _check_alike(facts: Sequence[_Facts]) -> None:
    """Raise ConfigError if the ranks are on several machines or have different settings."""
    first = facts[0]
    for rank, each in enumerate(facts):
        if each.machine != first.machine:
            raise ConfigError(
                f"ranks 0 and {rank} of pg_collection.tp are on two machines, {first.machine} and "
                f"{each.machine}; the ranks of an engine share one: make smaller groups"
            )
        for name, value in first.settings.items():
            if each.settings[name] != value:
                raise ConfigError(
                    f"{name}={value} on rank 0 of pg_collection.tp, and {each.settings[name]} on "
                    f"rank {rank}; give all ranks the same"
                )


@contextlib.contextmanager
def _errors_sent_to(channel: LeadChannel) -> Iterator[None]:
    """Send an error of the `with` block to the other ranks, so that they raise it instead of
    waiting."""
    try:
        yield
    except BaseException as error:
        channel.end(error)
        raise
