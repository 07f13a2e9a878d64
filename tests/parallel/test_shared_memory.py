"""MappedFile in little room; SharedTensors: how long other processes can open them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.errors import WeightUpdateError
from rollout.parallel.shared_memory import MappedFile, SharedTensors, write_shared
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def test_mapped_file_room_uses_all_the_memory_that_is_left(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, allocate = 5 * MIB, os.posix_fallocate

    def allocate_in_little_room(descriptor: int, start: int, num_bytes: int) -> None:
        if start + num_bytes > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate_in_little_room)
    file = MappedFile(descriptor, 100 * MIB)
    for start in range(0, room, MIB):
        file.room(start, MIB).fill_(1)
    with pytest.raises(OSError, match="No space left"):
        file.room(room, 1)
    file.cut(room)
    assert os.read(descriptor, room + 1) == bytes([1]) * room


def test_mapped_file_cut_allocates_bytes_that_were_not_written(descriptor: int) -> None:
    MappedFile(descriptor, MIB).cut(10)
    status = os.fstat(descriptor)
    assert (status.st_size, status.st_blocks > 0) == (10, True)


CHILD = """
    import os, resource
    from rollout.parallel.shared_memory import MappedFile

    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
    file = MappedFile(os.memfd_create("test"), {capacity})
    file.room(0, {limit}).fill_(1)
    try:
        file.room(0, {limit} + 1)
    except OSError as error:
        print(error)
"""


def test_mapped_file_keeps_the_limit_on_file_sizes() -> None:
    source = textwrap.dedent(CHILD).format(limit=4 * MIB, capacity=100 * MIB)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.stdout == f"{4 * MIB + 1} bytes are more than the file's capacity of {4 * MIB}\n", (
        run
    )


# ---- SharedTensors


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


def test_shared_tensors_can_be_opened_while_a_view_lives() -> None:
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


def test_fetched_shared_tensors_are_opened_again_without_a_copy() -> None:
    transport = SharedTransport()
    fetched = WeightFetcher()(transport.publish(tensors()))
    assert isinstance(fetched, SharedTensors)
    transport.close()  # the push is over for its sender
    check_equal(SharedTensors(fetched.address, fetched.places))
    descriptor = Path(fetched.address)
    assert descriptor.exists()
    del fetched
    assert not descriptor.exists()
