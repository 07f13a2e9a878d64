"""A rank of an engine other than rank 0, as a child of rank 0's process:
`python -m rollout.engine.follower_process --child`.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rollout.backends.meeting import Meeting
from rollout.backends.select import device_of, use_device
from rollout.child_process import run_child
from rollout.config import InferenceConfig
from rollout.engine.follower import follow
from rollout.engine.muscle import Muscle
from rollout.engine.rank import EngineSizes, LoadedModel, load_model, runner_of
from rollout.parallel.channel import FollowerChannel
from rollout.parallel.wire import SocketWire

_START_S = 1800.0


def _be_rank(
    pipe: Connection, place: tuple[int, str], given: tuple[Any, InferenceConfig, int]
) -> None:
    """`place`: the rank, and where its collectives meet. `given`: as for `load_model`."""
    (rank, address), (model, config, weights_version) = place, given
    use_device(config, rank)
    meeting = Meeting(device_of(config), config.tensor_parallel_size, address)
    # Rank 0 has a deadline for the others, which end with it: they need none.
    collectives = meeting.collectives(rank, timeout_s=math.inf)
    loaded = load_model(model, config, weights_version, collectives)
    del model, given
    pipe.send("loaded")
    wire = SocketWire(socket.socket(fileno=os.dup(pipe.fileno())))
    staging = SocketWire(wire.receive_socket(_START_S))
    channel = FollowerChannel(rank, wire)
    _answer_next(channel, lambda choices: _prepare(loaded, choices))
    muscle = _answer_next(channel, lambda sizes: _begin(loaded, sizes), tells=False)
    follow(muscle, collectives, channel, FollowerChannel(rank, staging))


def _prepare(loaded: LoadedModel, choices: Any) -> int:
    """Prepare the model as rank 0 did. Returns the blocks that fit here."""
    loaded.backend.ops.take_choices(choices)
    loaded.model.prepare(loaded.backend)
    return loaded.sizes.num_blocks


def _begin(loaded: LoadedModel, sizes: EngineSizes) -> Muscle:
    return Muscle(*runner_of(loaded, sizes), loaded.weights)


def _answer_next(
    channel: FollowerChannel, work: Callable[[Any], Any], *, tells: bool = True
) -> Any:
    """Do the next order, and answer it with what it gives if it `tells` that, or with its error,
    which is raised here, too."""
    _, arguments = channel.order()
    try:
        result = work(*arguments)
    except Exception as error:  # rank 0 waits for it
        channel.answer(error)
        raise
    channel.answer(result if tells else None)
    return result


if __name__ == "__main__":
    run_child(_be_rank)
