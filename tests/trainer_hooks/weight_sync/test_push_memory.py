"""A push of a sharded model holds one whole tensor above the model, on every rank."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from rollout.weights.transports.collective import CollectiveTransport
from rollout.weights.transports.directory import DirectoryTransport
from rollout.weights.transports.registry import WeightFetcher
from rollout.weights.transports.shared import SharedTransport
from tests.processes import PROCESSES
from tests.trainer_hooks.weight_sync.push_memory import NUM_LAYERS, TENSOR_BYTES, WIDTH, measure

TRANSPORTS = {
    "shared": lambda path: SharedTransport,
    "directory": lambda path: partial(DirectoryTransport, path / "weights"),
    "collective": lambda path: partial(CollectiveTransport, bucket_bytes=TENSOR_BYTES),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_push_takes_one_bucket_above_the_model(kind: str, tmp_path: Path) -> None:
    """The collective's own bucket, which stays from push to push, is not counted again."""
    make_transport, ends = TRANSPORTS[kind](tmp_path), []
    for rank in range(2):
        mine, theirs = PROCESSES.Pipe()
        arguments = (tmp_path / "store", rank, theirs, make_transport)
        process = PROCESSES.Process(target=measure, args=arguments)
        process.start()
        theirs.close()
        ends.append((process, mine))
    try:
        peaks = [_peak_of_rank(pipe) for _, pipe in ends]
    finally:
        for process, _ in ends:
            process.join(30)
            process.kill()
            process.join()
    print(f"{kind}: {[round(peak / 2**20, 1) for peak in peaks]} MiB of {TENSOR_BYTES / 2**20}")
    assert max(peaks) <= 1.1 * TENSOR_BYTES
    assert max(peaks) >= 0.9 * TENSOR_BYTES, "it was gathered at all"


def _peak_of_rank(pipe: Any) -> int:
    """Fetch each push of the rank, as an engine does. Returns its peak in bytes."""
    fetcher, peak = WeightFetcher(), 0
    for what, value in iter(pipe.recv, None):
        assert what != "error", value
        if what == "peak":
            peak = value
            break
        tensors = fetcher(structs.replace(value, num_members=1))
        assert isinstance(tensors, dict)
        assert sorted(tensors) == [f"{layer}.weight" for layer in range(NUM_LAYERS)]
        assert torch.equal(tensors["0.weight"], torch.ones(WIDTH, WIDTH))
        pipe.send("fetched")
    return peak
