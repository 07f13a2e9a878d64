"""CudaIpcTransport: another process reads the bucket in place, and reports when it has."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec import structs

from rollout.backends.shared_buffer import (
    close_shared_buffer,
    create_shared_buffer,
    open_shared_buffer,
)
from rollout.errors import ConfigError, WeightUpdateError
from rollout.weights.transports import buckets
from rollout.weights.transports.collective import CollectiveReceiver, CudaIpcTransport

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0
READER = """
import sys, torch
from rollout.weights.source import WeightsSource
from rollout.weights.transports.registry import WeightFetcher
fetcher = WeightFetcher()
print("ready", flush=True)
for line in sys.stdin:
    count, _, address = line.strip().partition(" ")
    source = WeightsSource(
        kind="cuda_ipc", address=address, manifest=b"", checksum="", num_members=int(count)
    )
    print(*[f"{name}={tensor.double().sum():g}" for name, tensor in fetcher(source).items()])
    sys.stdout.flush()
"""


@pytest.mark.parametrize("place", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cuda_ipc_pushes_are_fetched_by_another_process(place: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", READER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    transport = CudaIpcTransport(place=place, bucket_bytes=4096)
    # A process cannot open its own memory of a device.
    beside = [CollectiveReceiver()] if place == "host" else []
    num_members = 1 + len(beside)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for value in (1.0, 2.0, 3.0):
            given = {"a": torch.full((5000,), value), "b": torch.full((3,), value).bfloat16()}
            source = transport.publish(given)
            with ThreadPoolExecutor(2) as threads:
                sending = threads.submit(transport.send, source)
                ordered = structs.replace(source, num_members=num_members)
                fetches = [threads.submit(receiver.fetch, ordered) for receiver in beside]
                process.stdin.write(f"{num_members} {source.address}\n")
                process.stdin.flush()
                assert process.stdout.readline() == f"a={5000 * value:g} b={3 * value:g}\n"
                for fetch in fetches:
                    assert torch.equal(fetch.result(WAIT_S)["a"], given["a"])
                sending.result(WAIT_S)
            transport.commit()
    finally:
        process.kill()
        process.wait()
        transport.close()


def test_cuda_ipc_send_ends_if_an_engine_reads_no_bucket_and_the_next_push_works() -> None:
    transport = CudaIpcTransport(place="host", bucket_bytes=64, stall_timeout_s=2.0)
    receiver, weights = CollectiveReceiver(), {"a": torch.ones(100)}
    for is_slow in (False, True, False):
        source = transport.publish(weights)
        ordered = structs.replace(source, num_members=1)
        with ThreadPoolExecutor(2) as threads, pytest.MonkeyPatch.context() as patch:
            if is_slow:
                patch.setattr("rollout.weights.transports.buckets.SharedBucket.taken", _forget)
            sending = threads.submit(transport.send, source)
            fetch = threads.submit(receiver.fetch, ordered)
            if is_slow:
                with pytest.raises(WeightUpdateError, match="1 of 1 engines have not read it"):
                    sending.result(WAIT_S)
                with pytest.raises(WeightUpdateError, match=r"the sender ended .* bucket 1 failed"):
                    fetch.result(WAIT_S)
            else:
                assert torch.equal(fetch.result(WAIT_S)["a"], weights["a"])
                sending.result(WAIT_S)
        transport.commit() if not is_slow else transport.roll_back()
    transport.close()


def _forget(self: object, key: str) -> None:
    """Say nothing."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_ipc_transport_refuses_an_unknown_place() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaIpcTransport()
    with pytest.raises(ConfigError, match="'moon'"):
        CudaIpcTransport(place="moon")


def test_open_shared_buffer_refuses_a_missing_or_small_buffer() -> None:
    buffer = create_shared_buffer("host", 64)
    buffer.bytes_N.fill_(5)
    opened_N = open_shared_buffer("host", buffer.address, 64)
    buffer.bytes_N[3] = 6
    assert opened_N.tolist() == [5, 5, 5, 6] + [5] * 60
    with pytest.raises(ValueError, match="less than 65 bytes"):
        open_shared_buffer("host", buffer.address, 65)
    for address in ("", "/etc/passwd", f"/proc/{os.getpid()}/fd/../../1/fd/0"):
        with pytest.raises(ValueError, match="is not an address"):
            open_shared_buffer("host", address, 64)
    close_shared_buffer(buffer)
    assert opened_N[3] == 6, "who has it keeps it"
    with pytest.raises((OSError, ValueError)):
        open_shared_buffer("host", buffer.address, 64)


class Recorded:
    """The store of a group, and a stream of a device: what is asked of them, in its order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def add(self, key: str, _amount: int) -> None:
        self.calls.append(f"add {key}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_taken_waits_for_the_copies_of_its_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine may capture a step meanwhile: who waits for all streams of the device then gets an
    error, and the capture is lost."""
    recorded, place = Recorded(), torch.empty(8, dtype=torch.uint8, device="meta")

    def synchronize(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(buckets, "open_shared_buffer", lambda *_: place)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _device: recorded)
    buckets.SharedBucket.opened(recorded, "cuda", "address", 8).taken("3-0")
    assert recorded.calls == ["synchronize", "add 3-0/taken"]
