"""Clients that send only legal messages, in ways that could harm the coordinator."""

from __future__ import annotations

import time

import numpy as np
import pytest
import zmq

from rollout import SamplingParams
from rollout.control.commands import Shutdown
from rollout.coordinator.core.context import CoordinatorLimits
from rollout.coordinator.protocol.codec import encode, frames_in
from rollout.coordinator.protocol.messages import (
    Disconnect,
    Heartbeat,
    Sample,
    SubmitRequest,
)
from rollout.coordinator.protocol.packed import (
    pack_params,
)
from tests.coordinator.fake_client import FakeClient
from tests.coordinator.hostile_peers import HostilePeer, client_connect, rss_mib
from tests.coordinator.test_coordinator_process import (
    Line,
    coordinator_process,
    lines,
    until,
)

pytestmark = pytest.mark.distributed
PARAMS = pack_params(SamplingParams(num_tokens_to_generate=1))


def submit(request_id: int) -> SubmitRequest:
    sample = Sample(request_id=request_id, sampling_params=PARAMS, seed=1)
    return SubmitRequest(samples=(sample,), prompt_tokens=np.ones(4, np.int32))


def answered_s(line: Line, sequence: int) -> float:
    """Return the seconds until a heartbeat of an honest client is answered."""
    start = time.monotonic()
    line.send(Heartbeat(sequence=sequence))
    until(lambda: Heartbeat(sequence=sequence) in line.peer.seen, line)
    return time.monotonic() - start


@pytest.mark.slow
def test_a_client_that_does_not_read_delays_no_other_peer() -> None:
    """It has many kept replies, does not read them, and asks for them again and again."""
    limits = CoordinatorLimits(heartbeat_s=0.2, client_lease_s=60.0)
    num_kept, num_asked = 2000, 150
    with (
        coordinator_process(limits=limits) as (process, address),
        lines(address) as (client, engines),
        zmq.Context() as context,
    ):
        before = rss_mib(process.pid)
        peer = HostilePeer(context, address, client_connect(1), reads=False)
        for number in range(num_kept):
            peer.send([encode(submit(number))])
        own = client.peer
        assert isinstance(own, FakeClient)
        client.send(own.submission([3]))  # behind all of them
        until(lambda: own.asked[0].replies, client, *engines)
        slowest_s = 0.0
        for number in range(num_asked):
            peer.shake_hands()
            peer.send([encode(Heartbeat(sequence=number))])
            if number % 30 == 0:
                slowest_s = max(slowest_s, answered_s(client, number))
        slowest_s = max(slowest_s, answered_s(client, num_asked))
        after = rss_mib(process.pid)
        print(
            f"\n{num_asked} times {num_kept} kept replies asked for, none read: an honest "
            f"heartbeat took {slowest_s:.2f} s at most; RSS {before:.1f}, then {after:.1f} MiB"
        )
        peer.socket.close(linger=0)
        client.send(own.command(Shutdown))
        until(lambda: any(isinstance(m, Disconnect) for m in own.seen), client, *engines)
    assert slowest_s < 20.0
    assert after - before < 48


@pytest.mark.slow
def test_a_message_of_many_large_parts_is_dropped_and_its_memory_given_back() -> None:
    """Each part is of a legal size; a message of ours has one."""
    with (
        coordinator_process(max_frame_bytes=2**20) as (process, address),
        lines(address) as (client, _),
        zmq.Context() as context,
    ):
        before = rss_mib(process.pid)
        peer = HostilePeer(context, address, client_connect(1), reads=True)
        for number in range(5):
            peer.send([bytes(1_000_000)] * 60)
            peer.socket.send(encode(Heartbeat(sequence=number)))
            while encode(Heartbeat(sequence=number)) not in frames_in(peer.socket.recv()):
                pass
        after = rss_mib(process.pid)
        print(f"\n5 messages of 60 parts of 1 MB; RSS {before:.1f}, then {after:.1f} MiB")
        peer.socket.close(linger=0)
        process.terminate()
        until(lambda: any(isinstance(m, Disconnect) for m in client.peer.seen), client)
    assert after - before < 80
