"""KeptTransport: weights that engines fetch from shared memory or from files in memory.

They stay until other weights are committed, and their memory is reused once it has no reader.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout.errors import WeightUpdateError
from rollout.weights.source import WeightsSource
from rollout.weights.transports.directory import DirectoryTransport
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from rollout.weights.update import by_name

Kept = SharedTransport | DirectoryTransport
GONE = "cannot be (opened|read)"


@pytest.fixture(params=[SharedTransport.kind, DirectoryTransport.kind])
def transport(request: pytest.FixtureRequest) -> Iterator[Kept]:
    if request.param == SharedTransport.kind:
        made: Kept = SharedTransport()
        yield made
        made.close()
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        made = DirectoryTransport(path)
        yield made
        made.close()
        assert not list(Path(path).iterdir())


def pushed(transport: Kept, value: float, size: int = 1000) -> WeightsSource:
    """Publish and commit weights of one value."""
    source = transport.publish({"w": torch.full((size,), value), "v": torch.zeros(3)})
    transport.commit()
    return source


def fetched(source: WeightsSource) -> torch.Tensor:
    return by_name(WeightFetcher()(source))["w"]


def files_of(source: WeightsSource) -> list[int]:
    path = Path(source.address.partition(" ")[0])
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sorted(file.stat().st_ino for file in files)


def test_committed_weights_stay_until_others_are_committed(transport: Kept) -> None:
    assert transport.committed is None
    first = transport.publish({"w": torch.ones(4)})
    assert transport.committed is None
    transport.commit()
    refused = transport.publish({"w": torch.zeros(4)})
    transport.roll_back()
    assert transport.committed is first
    assert torch.equal(fetched(first), torch.ones(4))
    second = pushed(transport, 2.0)
    assert transport.committed is second
    transport.publish({"w": torch.ones(4)})
    for gone in (first, refused):
        with pytest.raises(WeightUpdateError, match=GONE):
            fetched(gone)
    assert torch.equal(fetched(second), torch.full((1000,), 2.0))
    transport.close()
    transport.close()
    with pytest.raises(WeightUpdateError, match=GONE):
        fetched(second)


def test_publish_writes_to_released_memory_without_a_reader(transport: Kept) -> None:
    files = []
    for value in range(5):
        source = pushed(transport, float(value), size=100 + value)
        files.append(files_of(source))
        assert torch.equal(fetched(source), torch.full((100 + value,), float(value)))
    assert files == [*files[:2], *files[:2], files[0]]
    assert files[0] != files[1]
    larger = pushed(transport, 1.0, size=1 << 20)
    assert files_of(larger) == files[1]
    assert torch.equal(fetched(larger), torch.ones(1 << 20))


def test_publish_leaves_memory_alone_until_its_last_view_has_gone(transport: Kept) -> None:
    first = pushed(transport, 1.0)
    view, used = fetched(first)[10:20], files_of(first)
    for value in (2.0, 3.0, 4.0):
        source = pushed(transport, value)
        assert files_of(source) != used
        assert torch.equal(view, torch.ones(10))
    del view
    last = fetched(source)
    transport.close()
    assert torch.equal(last, torch.full((1000,), 4.0)), "a reader keeps the memory it has opened"
