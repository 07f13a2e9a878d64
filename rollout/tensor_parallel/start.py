"""start_group: the processes that run one engine together, and the executor that leads them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
from pathlib import Path
from typing import Any

from torch import nn

from rollout.backends.limits import num_usable_cpus
from rollout.backends.process_groups import RankRendezvous
from rollout.backends.select import device_of
from rollout.child_process import ChildProcess, pickled
from rollout.config import InferenceConfig
from rollout.models.checkpoints.loading import spec_of, without_shards
from rollout.parallel.channel import LeadChannel, raise_first
from rollout.parallel.wire import SocketWire
from rollout.tensor_parallel.executor import TensorParallelExecutor, end_processes
from rollout.worker.loading import EngineSizes, LoadedModel, load_model, runner_of, sizes_of

logger = logging.getLogger(__name__)

_MODULE = "rollout.tensor_parallel.rank_process"


def start_group(
    model: str | Path | nn.Module | Any, config: InferenceConfig, weights_version: int
) -> tuple[LoadedModel, EngineSizes, TensorParallelExecutor]:
    """Start the other ranks of an engine as children of this process, which is rank 0, and load the
    model on all of them.

    Raises ConfigError and ModelError, of whatever rank, and LockstepError if a rank is lost.
    """
    config = _config_of_rank(config)
    size, timeout_s = config.tensor_parallel_size, config.tensor_parallel_timeout_s
    start_s = config.tensor_parallel_start_timeout_s
    spec_of(model, config.dtype).local(0, size)  # refuses before any process is there
    children: list[ChildProcess] = []
    with contextlib.ExitStack() as undo:
        undo.callback(end_processes, children)
        for _ in range(1, size):
            children.append(ChildProcess(_MODULE))  # one by one: all that started end with an error
        # Others, as a metrics writer of this process, are for rank 0 alone.
        of_followers = config.replace(metrics_writer=None, logging_step_interval=0)
        sent = pickled(
            (without_shards(model, config.dtype), of_followers, weights_version),
            "the model or its config",
        )
        meeting = RankRendezvous(device_of(config), size)
        for rank, child in enumerate(children, start=1):
            child.send(pickle.dumps((rank, meeting.address)), sent)
        del sent
        names = {f"rank {r} (process {c.pid})": c for r, c in enumerate(children, start=1)}
        collectives = meeting.collectives(0, timeout_s=timeout_s, check=lambda: channel.check())
        loaded = load_model(model, config, weights_version, collectives)
        for child in children:
            child.receive(start_s)
        meeting.close()
        wires = {name: _wire_to(child) for name, child in names.items()}
        channel = LeadChannel({n: w for n, (w, _) in wires.items()}, timeout_s=timeout_s)
        staging = LeadChannel({n: w for n, (_, w) in wires.items()}, timeout_s=timeout_s)
        sizes = prepare_ranks(loaded, channel)
        runner, kv = runner_of(loaded, sizes)
        raise_first(channel.answers(timeout_s=start_s))
        executor = TensorParallelExecutor(
            *(runner, kv, loaded.weights),
            collectives=collectives,
            channel=channel,
            staging=staging,
            followers=children,
        )
        undo.pop_all()
    logger.info("tensor parallel: rank 0 of %d, with %s", size, ", ".join(names))
    return loaded, sizes, executor


def prepare_ranks(loaded: LoadedModel, channel: LeadChannel) -> EngineSizes:
    """Prepare the model on all ranks. Returns the sizes that fit all ranks, which answer the last
    order when they have memory of these sizes."""
    loaded.model.prepare(loaded.backend)
    channel.send("prepare")
    answers = channel.answers(timeout_s=loaded.config.tensor_parallel_start_timeout_s)
    raise_first(answers)
    sizes, num_blocks = loaded.sizes, min(loaded.sizes.num_blocks, *answers)
    if num_blocks < sizes.num_blocks:
        sizes = sizes_of(loaded.config, loaded.backend, loaded.model, num_blocks)
    channel.send("begin", sizes)
    return sizes


def _config_of_rank(config: InferenceConfig) -> InferenceConfig:
    """The config of each rank: on a CPU they share its processors."""
    if config.num_threads is not None or device_of(config) != "cpu":
        return config
    return config.replace(num_threads=max(1, num_usable_cpus() // config.tensor_parallel_size))


def _wire_to(child: ChildProcess) -> tuple[SocketWire, SocketWire]:
    """Wires to a child for its two channels: the pipe that it was started with, and another one
    that it is given through that."""
    first = SocketWire(socket.socket(fileno=os.dup(child.pipe.fileno())))
    child.pipe.close()
    ours, theirs = socket.socketpair()
    with theirs:
        first.send_socket(theirs)
    return first, SocketWire(ours)
