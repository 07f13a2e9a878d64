"""WeightPublisher: one copy for all, fetchable from other processes, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec import structs

from rollout.coordinator.protocol.messages import UpdateWeights, WeightsSource, decode, encode
from rollout.coordinator.publisher import WeightPublisher, fetch_weights
from rollout.errors import WeightUpdateError

ROOT = Path(__file__).parents[2]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b.weight": torch.randn(7, generator=generator).bfloat16(),
        "strided": torch.randn(4, 6, generator=generator).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "ids": torch.arange(4),
    }


def over_the_wire(source: WeightsSource) -> WeightsSource:
    message = decode(encode(UpdateWeights(command_id=1, source=source)))
    assert isinstance(message, UpdateWeights)
    return message.source


def test_what_is_fetched_is_what_was_published() -> None:
    publisher = WeightPublisher()
    fetched = fetch_weights(over_the_wire(publisher.publish(tensors())))
    publisher.close()
    assert fetched.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert fetched[name].dtype == tensor.dtype
        assert torch.equal(fetched[name], tensor), "also after the publisher gave it up"


def test_the_committed_weights_stay_until_the_next_are() -> None:
    publisher = WeightPublisher()
    assert publisher.committed is None
    first = publisher.publish({"w": torch.ones(4)})
    assert publisher.committed is None
    publisher.commit()
    publisher.publish({"w": torch.zeros(4)})
    publisher.drop()
    assert publisher.committed is first
    assert torch.equal(fetch_weights(first)["w"], torch.ones(4))
    second = publisher.publish({"w": torch.full((4,), 2.0)})
    publisher.commit()
    assert publisher.committed is second
    assert torch.equal(fetch_weights(second)["w"], torch.full((4,), 2.0))
    with pytest.raises(WeightUpdateError, match="cannot be had"):
        fetch_weights(first)
    publisher.publish({"w": torch.ones(4)})
    with pytest.raises(WeightUpdateError, match="given up for newer ones"):
        fetch_weights(first)
    publisher.close()
    publisher.close()
    with pytest.raises(WeightUpdateError, match="cannot be had"):
        fetch_weights(second)


def test_no_descriptor_is_left_by_any_number_of_updates() -> None:
    publisher = WeightPublisher()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        publisher.publish(tensors())
        publisher.commit()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    publisher.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tensor_that_cannot_be_copied_is_named() -> None:
    publisher = WeightPublisher()
    with pytest.raises(WeightUpdateError, match="'bad'"):
        publisher.publish({"good": torch.ones(2), "bad": torch.empty(2, device="meta")})
    publisher.commit()
    assert publisher.committed is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": 64},
        {"offset": 10_000},
        {"offset": 2},
        {"dtype": "nonsense"},
        {"shape": (9,)},
        {"shape": (2**32, 2**32), "num_bytes": 0},
        {"shape": (2**62, 2**62, 0), "num_bytes": 0},
    ],
)
def test_a_manifest_that_lies_is_refused(change: dict[str, object]) -> None:
    publisher = WeightPublisher()
    source = publisher.publish({"w": torch.ones(4), "behind it": torch.ones(4)})
    manifest = {"w": structs.replace(source.manifest["w"], **change)}
    with pytest.raises(WeightUpdateError, match="'w'"):
        fetch_weights(structs.replace(source, manifest=manifest))
    with pytest.raises(WeightUpdateError, match="kind 'carrier pigeon'"):
        fetch_weights(structs.replace(source, kind="carrier pigeon"))
    publisher.close()


def test_other_processes_fetch_it_and_nothing_is_left_of_a_killed_publisher() -> None:
    program = """
import sys, torch
from rollout.coordinator.publisher import WeightPublisher
source = WeightPublisher().publish({"w": torch.arange(5.0)})
print(source.address, flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        publisher = WeightPublisher()
        here = publisher.publish({"w": torch.arange(5.0)})
        publisher.close()
        there = structs.replace(here, address=address)
        fetched = fetch_weights(there)["w"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert torch.equal(fetched, torch.arange(5.0))
    with pytest.raises(WeightUpdateError, match="is their publisher alive"):
        fetch_weights(there)
