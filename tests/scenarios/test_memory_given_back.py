"""With a filled pool of 512 MiB, suspend returns memory to the system, and addresses stay."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import PROCESSES
from tests.scenarios.memory_probe import cycle, static_cycles

PAGE_SLACK = 1 << 16


def probe(kind: str, mode: str, release: str) -> Any:
    """Run a function of memory_probe in a process of its own: the system counts by process."""
    with PROCESSES.Pool(1) as pool:
        return pool.apply(cycle, (kind, mode, tuple(release.split("+"))))


@pytest.mark.parametrize(
    ("mode", "release"), [("offload", "kv_cache"), ("recompute", "kv_cache+weights")]
)
@pytest.mark.parametrize("kind", ["device", "reserved"])
def test_private_memory_falls_by_the_reported_bytes(kind: str, mode: str, release: str) -> None:
    """Within 5%, including the copies on the host."""
    seen = probe(kind, mode, release)
    fall = seen["before"]["dirty"] - seen["after"]["dirty"]
    assert seen["released"] >= 512 << 20
    assert fall == pytest.approx(seen["released"] - seen["on_host"], rel=0.05)
    assert seen["num_finished"] == 2
    if kind == "reserved":
        assert_mappings_stay_without_a_page(seen, release)


def assert_mappings_stay_without_a_page(seen: Any, release: str) -> None:
    """In /proc/self/smaps: the pool's, and the weights' if the weights are released."""
    assert seen["before"]["kv"]["rss"] >= seen["pool"] >= 512 << 20
    assert seen["after"]["kv"]["rss"] == 0
    for edge in ("start", "end"):
        assert seen["after"]["kv"][edge] == seen["before"]["kv"][edge]
    weights = 0 if "weights" in release else seen["weights"]
    assert weights <= seen["after"]["weights"]["rss"] <= weights + PAGE_SLACK


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_static_pointers_stay_through_twenty_suspends_updates_and_resumes(mode: str) -> None:
    pointers, version = static_cycles(mode)
    assert len(pointers) == 21
    assert all(each == pointers[0] for each in pointers)
    assert len(set(pointers[0].values())) == 4
    assert version == 20
