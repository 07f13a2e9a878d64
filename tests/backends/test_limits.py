"""memory_limit_bytes and num_usable_cpus, read from a tree of files like the system's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.backends.cpu import backend as cpu
from rollout.backends.limits import memory_limit_bytes, num_usable_cpus
from tests.tiny_models import tiny_engine, tiny_model

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
Machine = Callable[[dict[str, str]], Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that makes a machine with 8 CPUs and the given files in /proc and /sys."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def make(files: dict[str, str]) -> Path:
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return make


def test_without_cgroups_all_memory_and_the_cpus_of_the_affinity_count(machine: Machine) -> None:
    root = machine({})
    assert (memory_limit_bytes(root), num_usable_cpus(root)) == (PHYSICAL, 8)


V2 = {"proc/self/cgroup": "0::/slice/job\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"slice/job/memory.max": "4096\n"}, 4096),
        ({"slice/job/memory.max": "max\n", "slice/memory.max": "8192\n"}, 8192),
        ({"slice/job/memory.max": "8192\n", "memory.max": "4096\n"}, 4096),
        ({"slice/job/memory.max": f"{2**60}\n"}, PHYSICAL),
        ({"slice/job/memory.max": ""}, PHYSICAL),
        ({"slice/other/memory.max": "4096\n"}, PHYSICAL),
    ],
)
def test_the_lowest_limit_of_the_own_cgroup_and_those_around_it_counts(
    machine: Machine, files: dict[str, str], expected: int
) -> None:
    root = machine(V2 | {f"sys/fs/cgroup/{name}": content for name, content in files.items()})
    assert memory_limit_bytes(root) == expected


V1 = {
    "proc/self/cgroup": (
        "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n"
    )
}


@pytest.mark.parametrize("folder", ["docker/abc", "docker", "."])
def test_limits_of_the_first_version_count_wherever_the_mount_begins(
    machine: Machine, folder: str
) -> None:
    unlimited = {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}
    limited = {
        f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes": "4096\n",
        f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_quota_us": "250000\n",
        f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_period_us": "100000\n",
    }
    root = machine(V1 | unlimited | limited)
    assert (memory_limit_bytes(root), num_usable_cpus(root)) == (4096, 3)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("6400000 100000", 8)],
)
def test_the_quota_of_cpu_time_is_rounded_up_to_whole_cpus(
    machine: Machine, quota: str, expected: int
) -> None:
    root = machine(V2 | {"sys/fs/cgroup/slice/cpu.max": f"{quota}\n"})
    assert num_usable_cpus(root) == expected


def test_an_unlimited_quota_of_the_first_version_is_none(machine: Machine) -> None:
    quota = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}
    files = {f"sys/fs/cgroup/cpu/{name}": content for name, content in quota.items()}
    assert num_usable_cpus(machine({"proc/self/cgroup": "1:cpu:/\n"} | files)) == 8


def test_the_default_pool_is_a_quarter_of_what_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "memory_limit_bytes", lambda: 1 << 20)
    engine = tiny_engine(tiny_model(), buffer_size_gb=None, block_size_tokens=8)
    bytes_per_block = 8 * 2 * 2 * 2 * 16 * 4  # tokens x layers x (K, V) x heads x dim x float32
    assert engine.stats().num_blocks_total == (1 << 18) // bytes_per_block
