"""A pytest plugin: record the kernels that the tests launch, see `scripts.kernel_launches`.

    TRITON_INTERPRET=1 ROLLOUT_LAUNCHES=FILE pytest -p tests.recorded_launches TESTS

With ROLLOUT_LAUNCHES_DEVICE=1 it runs what is marked gpu, and nothing else, on a stand-in for the
device: launches are recorded, results are torch's. `make gpu-bundle` runs both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from scripts.kernel_launches import recorded
from tests.backends.launching_device import launching_device, run_captured_steps_again

ON_DEVICE = os.environ.get("ROLLOUT_LAUNCHES_DEVICE") == "1"
# What asks CUDA itself, and launches what other tests launch.
ASKS_CUDA = (
    "test_suspend_reports_the_bytes_that_the_driver_gets_back",
    "unified",
    "torch_memory_saver",
)


@pytest.fixture(scope="session", autouse=True)
def recorded_launches() -> Iterator[None]:
    path = Path(os.environ["ROLLOUT_LAUNCHES"])
    with recorded(path) as recorder, launching_device(recorder) if ON_DEVICE else nullcontext():
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On the stand-in: keep the tests marked gpu, and let them run."""
    if not ON_DEVICE:
        return
    kept = [
        item
        for item in items
        if item.get_closest_marker("gpu") and not any(part in item.name for part in ASKS_CUDA)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    for item in kept:
        item.own_markers = [marker for marker in item.own_markers if marker.name != "skip"]
        run_captured_steps_again(getattr(item, "module", None))
