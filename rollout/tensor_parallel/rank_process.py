"""A rank of an engine other than rank 0, as a child of rank 0's process:
`python -m rollout.tensor_parallel.rank_process --child`.
"""

from __future__ import annotations

import math
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

from rollout.backends.process_groups import RankRendezvous
from rollout.backends.select import device_of, use_device
from rollout.child_process import run_child
from rollout.config import InferenceConfig
from rollout.parallel.channel import FollowerChannel
from rollout.parallel.wire import SocketWire
from rollout.tensor_parallel.follower import follow, prepared_worker
from rollout.worker.loading import load_model


def _be_rank(
    pipe: Connection, place: tuple[int, str], given: tuple[Any, InferenceConfig, int]
) -> None:
    """`place`: the rank, and where its collectives meet. `given`: as for `load_model`."""
    (rank, address), (model, config, weights_version) = place, given
    use_device(config, rank)
    meeting = RankRendezvous(device_of(config), config.tensor_parallel_size, address)
    # Rank 0 has a deadline for the others, which end with it: they need none.
    collectives = meeting.collectives(rank, timeout_s=math.inf)
    loaded = load_model(model, config, weights_version, collectives)
    del model, given
    pipe.send("loaded")
    wire = SocketWire(socket.socket(fileno=os.dup(pipe.fileno())))
    staging = SocketWire(wire.receive_socket(config.tensor_parallel_start_timeout_s))
    channel = FollowerChannel(rank, wire)
    worker = prepared_worker(channel, loaded)
    follow(worker, collectives, channel, FollowerChannel(rank, staging))


if __name__ == "__main__":
    run_child(_be_rank)
