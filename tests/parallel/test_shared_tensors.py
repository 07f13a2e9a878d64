"""Tensors that several ranks read: where they lie, and for how long others can open them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.parallel.shared_tensors import SharedTensors, write_shared
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "with gaps": torch.randn(6, 8, generator=generator)[:, ::2],
        "counts": torch.arange(7),
    }


def check_equal(found: SharedTensors) -> None:
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_what_one_process_writes_another_opens_while_the_first_has_a_view() -> None:
    shared = write_shared(tensors().items())
    check_equal(shared)
    address, places, view = shared.address, shared.places, shared["half"]
    opened = SharedTensors(address, places)
    del shared
    check_equal(SharedTensors(address, places))
    del view
    with pytest.raises(WeightUpdateError, match="cannot be opened"):
        SharedTensors(address, places)
    check_equal(opened)


def test_what_came_through_shared_memory_is_passed_on_without_a_copy() -> None:
    transport = SharedTransport()
    fetched = WeightFetcher()(transport.publish(tensors()))
    assert isinstance(fetched, SharedTensors)
    transport.close()  # the push is over for its sender
    check_equal(SharedTensors(fetched.address, fetched.places))
    descriptor = Path(fetched.address)
    assert descriptor.exists()
    del fetched
    assert not descriptor.exists()
