"""CollectiveTransport: every push ends for all engines, with its reason, and the next one works."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from rollout.errors import ConfigError, WeightUpdateError
from rollout.weights.source import WeightsSource
from rollout.weights.transports import buckets, collective
from rollout.weights.transports.buckets import PushEnd
from rollout.weights.transports.collective import CollectiveReceiver, CollectiveTransport
from rollout.weights.transports.registry import WeightFetcher

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0
Tensors = dict[str, Tensor]


@pytest.fixture
def transport() -> Iterator[CollectiveTransport]:
    transport = CollectiveTransport(bucket_bytes=64)
    yield transport
    transport.close()


def weights(value: float = 1.0) -> Tensors:
    return {"a": torch.full((50,), value), "b": torch.full((3, 7), value).bfloat16()}


def begun(
    transport: CollectiveTransport, receivers: list[CollectiveReceiver], given: Any
) -> tuple[Future[None], list[Future[Tensors]]]:
    """The send and the fetches of a push, each in a thread."""
    source = transport.publish(given)
    threads = ThreadPoolExecutor(1 + len(receivers))
    ordered = structs.replace(source, num_members=len(receivers))
    sending = threads.submit(transport.send, source)
    fetches = [threads.submit(receiver.fetch, ordered) for receiver in receivers]
    threads.shutdown(wait=False)
    return sending, fetches


def pushed(
    transport: CollectiveTransport, receivers: list[CollectiveReceiver], given: Tensors
) -> None:
    """Push, and check what came."""
    sending, fetches = begun(transport, receivers, given)
    for fetch in fetches:
        came = fetch.result(WAIT_S)
        assert came.keys() == given.keys()
        assert all(torch.equal(came[name], given[name]) for name in given)
    sending.result(WAIT_S)
    transport.commit()


def faults(fetches: list[Future[Tensors]]) -> list[str]:
    found = [fetch.exception(WAIT_S) for fetch in fetches]
    assert all(isinstance(fault, WeightUpdateError) for fault in found), found
    return [str(fault) for fault in found]


def group_of(transport: CollectiveTransport) -> str:
    assert transport._group
    return transport._group


def test_collective_send_keeps_the_group_of_the_same_engines(
    transport: CollectiveTransport,
) -> None:
    receivers = [CollectiveReceiver() for _ in range(3)]
    pushed(transport, receivers, weights(1.0))
    first = group_of(transport)
    for value in (2.0, 3.0):
        pushed(transport, receivers[::-1], weights(value))
        assert group_of(transport) == first
    pushed(transport, receivers[:2], weights(4.0))
    smaller = group_of(transport)
    assert smaller != first
    pushed(transport, [*receivers[:2], CollectiveReceiver()], weights(5.0))
    assert group_of(transport) not in (first, smaller)


def test_collective_send_removes_the_store_keys_of_old_pushes(
    transport: CollectiveTransport,
) -> None:
    receivers = [CollectiveReceiver() for _ in range(2)]
    counts = []
    for value in range(4):
        pushed(transport, receivers, weights(float(value)))
        counts.append(transport._store.num_keys())
    assert counts[1:] == counts[1:2] * 3


def test_collective_fetch_names_a_changed_bucket_on_all_engines(
    transport: CollectiveTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [CollectiveReceiver() for _ in range(2)]
    pushed(transport, receivers, weights())
    group, broadcast = group_of(transport), buckets.Broadcasts.broadcast

    def tearing(self: buckets.Broadcasts, bytes_N: Tensor, timeout_s: float) -> None:
        if self is transport._path:
            bytes_N = bytes_N.clone()
            bytes_N[3] ^= 1
        broadcast(self, bytes_N, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(buckets.Broadcasts, "broadcast", tearing)
        _, fetches = begun(transport, receivers, weights(2.0))
        for fault in faults(fetches):
            assert "bucket 1, of 'a' to 'a', does not match its hash" in fault
    transport.roll_back()
    pushed(transport, receivers, weights(3.0))
    assert group_of(transport) == group


def test_collective_fetch_refuses_a_wrong_checksum_on_all_engines(
    transport: CollectiveTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [CollectiveReceiver() for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(
            collective.BucketWriter, "end", lambda self: PushEnd(self._num_buckets, "f" * 16)
        )
        _, fetches = begun(transport, receivers, weights())
        assert all("with ffffffffffffffff" in fault for fault in faults(fetches))
    transport.roll_back()
    pushed(transport, receivers, weights(3.0))


def test_collective_send_ends_at_the_stall_timeout_and_the_next_push_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = CollectiveTransport(bucket_bytes=1 << 20, stall_timeout_s=3.0)
    receivers = [CollectiveReceiver() for _ in range(2)]
    pushed(transport, receivers, weights())
    slow, may_go_on, broadcast = (
        receivers[0]._path,
        threading.Event(),
        buckets.Broadcasts.broadcast,
    )

    def slowly(self: buckets.Broadcasts, bytes_N: Tensor, timeout_s: float) -> None:
        assert timeout_s == 3.0, "members have the sender's limit"
        if self is slow:
            may_go_on.wait(WAIT_S)
        broadcast(self, bytes_N, timeout_s)

    large = {"w": torch.ones(1 << 22)}  # more than the system holds for a member
    with monkeypatch.context() as patch:
        patch.setattr(buckets.Broadcasts, "broadcast", slowly)
        sending, fetches = begun(transport, receivers, large)
        with pytest.raises(WeightUpdateError, match=r"sending bucket \d failed"):
            sending.result(WAIT_S)
        may_go_on.set()
        faults(fetches)
    transport.roll_back()
    pushed(transport, receivers, weights(3.0))
    transport.close()


def test_collective_send_ends_a_push_that_was_rolled_back_before(
    transport: CollectiveTransport,
) -> None:
    """An update may fail before the thread of `send` begins. Engines may wait for it by then."""
    source = transport.publish(weights())
    transport.roll_back()
    transport.send(source)
    with pytest.raises(WeightUpdateError, match="ended the push: the push was rolled back"):
        CollectiveReceiver().fetch(structs.replace(source, num_members=1))
    pushed(transport, [CollectiveReceiver()], weights(2.0))


def test_collective_send_returns_if_the_transport_was_closed_before() -> None:
    transport = CollectiveTransport()
    first = transport.publish({"a": torch.zeros(2)})
    transport.roll_back()
    transport.send(first)  # its keys are in the store until the next push
    second = transport.publish({"a": torch.zeros(2)})
    transport.close()
    transport.send(second)


def test_collective_roll_back_ends_a_send_that_waits_for_an_engine(
    transport: CollectiveTransport,
) -> None:
    receivers = [CollectiveReceiver() for _ in range(2)]
    source = transport.publish(weights())
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(transport.send, source)
        ordered = structs.replace(source, num_members=2)
        fetch = threads.submit(receivers[0].fetch, ordered)
        transport.roll_back()
        sending.result(WAIT_S)
        assert faults([fetch]) == ["the sender ended the push: the push was rolled back"]
    pushed(transport, receivers, weights(2.0))


def test_collective_send_fails_when_an_engine_ends_and_the_next_push_works(
    transport: CollectiveTransport,
) -> None:
    """As a killed engine does, whose sockets the system closes."""
    receivers = [CollectiveReceiver() for _ in range(3)]
    pushed(transport, receivers, weights())
    may_end, has_begun = threading.Event(), threading.Event()

    def held() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(100)
        has_begun.set()
        assert may_end.wait(WAIT_S)
        yield "b", torch.ones(100)

    sending, fetches = begun(transport, receivers, held())
    assert has_begun.wait(WAIT_S)
    transport.roll_back()  # the coordinator has rolled the push back
    may_end.set()
    sending.result(WAIT_S)
    assert set(faults(fetches)) == {"the sender ended the push: the push was rolled back"}
    del receivers[0]
    pushed(transport, receivers, weights(2.0))


def test_collective_fetch_of_a_finished_push_fails_and_the_next_push_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does whose link was cut: the others have been given another push meanwhile."""
    transport = CollectiveTransport(bucket_bytes=4096)  # which holds all of a push
    receivers = [CollectiveReceiver() for _ in range(2)]
    pushed(transport, receivers, weights(1.0))
    is_held, is_back, taken = threading.Event(), threading.Event(), buckets.Broadcasts.taken
    own_path = receivers[1]._path

    def held_taken(path: buckets.Broadcasts, key: str) -> None:
        if path is own_path:
            is_held.set()
            assert is_back.wait(WAIT_S)
        taken(path, key)

    monkeypatch.setattr(buckets.Broadcasts, "taken", held_taken)
    sending, fetches = begun(transport, receivers, weights(2.0))
    fetches[0].result(WAIT_S)
    sending.result(WAIT_S)
    assert is_held.wait(WAIT_S)
    transport.roll_back()
    pushed(transport, receivers[:1], weights(3.0))
    is_back.set()
    assert "the push is over" in faults(fetches[1:])[0]
    pushed(transport, receivers, weights(4.0))
    transport.close()


def test_collective_fetch_fails_when_the_sender_is_killed_and_a_new_sender_works() -> None:
    program = """
import sys, torch
from rollout.weights.transports.collective import CollectiveTransport

def tensors():
    yield "a", torch.ones(100)
    print("begun", flush=True)
    sys.stdin.read()

transport = CollectiveTransport(bucket_bytes=64)
source = transport.publish(tensors())
print(source.address, flush=True)
transport.send(source)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    receivers = [CollectiveReceiver() for _ in range(2)]
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        source = WeightsSource(
            kind="collective", address=address, manifest=b"", checksum="", num_members=2
        )
        with ThreadPoolExecutor(2) as threads:
            fetches = [threads.submit(receiver.fetch, source) for receiver in receivers]
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGKILL)
            assert all("check that the trainer is running" in fault for fault in faults(fetches))
    finally:
        process.kill()
        process.wait()
    transport = CollectiveTransport()
    pushed(transport, receivers, weights(2.0))
    transport.close()


def test_collective_fetch_after_the_push_says_that_the_next_one_brings_weights(
    transport: CollectiveTransport,
) -> None:
    pushed(transport, [CollectiveReceiver()], weights())
    assert transport.committed is not None
    assert not transport.committed.is_kept
    with pytest.raises(WeightUpdateError, match="the next push brings them"):
        WeightFetcher()(transport.committed)


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:x y", "127.0.0.1:1 y"])
def test_collective_fetch_refuses_an_address_without_a_sender(address: str) -> None:
    source = WeightsSource(
        kind="collective", address=address, manifest=b"", checksum="", num_members=1
    )
    with pytest.raises(WeightUpdateError, match="check that the trainer is running"):
        CollectiveReceiver(connect_timeout_s=0.2).fetch(source)


def test_collective_transport_refuses_a_host_of_another_machine() -> None:
    with pytest.raises(ConfigError, match="no engine can reach weights at"):
        CollectiveTransport("192.0.2.1")
    with pytest.raises(ConfigError, match="bucket_bytes=12"):
        CollectiveTransport(bucket_bytes=12)
