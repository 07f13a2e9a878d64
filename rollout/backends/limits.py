"""Memory and CPUs that this process may use, as cgroups and affinity limit them.

Used by `rollout.backends.cpu.backend`, `rollout.tensor_parallel.start`, `rollout.launch.local`,
`rollout.launch.torchrun` and `trainer_hooks.train.threads`. Reads /proc and /sys, and changes
nothing.

A container sees all of the machine's memory and CPUs, but is killed or slowed down at the limits of
its cgroups. Source: cgroups(7); Documentation/admin-guide/cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")
_MOUNTS = "sys/fs/cgroup"


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Return the lowest of physical memory and the limits of this process's cgroups and their
    parents. `root` is the folder that has proc and sys."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += _numbers(folder / name)
    return min(limits)


def num_usable_cpus(root: Path = _ROOT) -> int:
    """Return the number of CPUs that affinity and cgroup quotas allow, rounded up. `root` is the
    folder that has proc and sys."""
    num_cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cpus = len(os.sched_getaffinity(0))
    for folder in _cgroups(root, "cpu"):
        quota_us = _numbers(folder / "cpu.max") or [
            *_numbers(folder / "cpu.cfs_quota_us"),
            *_numbers(folder / "cpu.cfs_period_us"),
        ]
        if len(quota_us) == 2 and quota_us[0] > 0 < quota_us[1]:
            num_cpus = min(num_cpus, math.ceil(quota_us[0] / quota_us[1]))
    return max(1, num_cpus)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's v2 cgroup, its v1 `controller` cgroup, and their parents.
    Some of the folders do not exist."""
    # In a container /proc may show the host's path. Then only the mount's root exists, which is the
    # container's own cgroup.
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = (root / _MOUNTS, root / _MOUNTS / "unified")
        elif controller in controllers.split(","):
            mounts = (root / _MOUNTS / controller, root / _MOUNTS / controllers)
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for part in (own, *own.parents):
                if ".." not in part.parts:
                    yield mount / part


def _numbers(path: Path) -> list[int]:
    """Return the file's integers; an empty list if the file does not exist or has other words."""
    words = _text(path).split()
    return [int(word) for word in words] if all(map(_is_number, words)) else []


def _is_number(word: str) -> bool:
    return word.lstrip("-").isdecimal()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
