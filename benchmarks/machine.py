"""The machine of a measurement: its CPU, versions, and this process's memory.

Used by `benchmarks.pages`, `benchmarks.host_step`, `benchmarks.kv_age`, `benchmarks.loading`,
`benchmarks.memory_cycles`, `benchmarks.trl_step` and `benchmarks.update`. Reads and writes files in
/proc.
"""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from rollout import InferenceConfig
from rollout.backends.select import create_backend


def describe(config: InferenceConfig) -> dict[str, str | int]:
    """Return CPU, versions, number of threads, and the backend's classes, but no host name.

    `config` selects the backend.
    """
    backend = create_backend(config)
    return {
        "cpu": _cpu_field("model name") or platform.machine(),
        "cpu_family_model": f"{_cpu_field('cpu family')}/{_cpu_field('model')}",
        "num_cores": os.cpu_count() or 0,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "ops": type(backend.ops).__name__,
        "attention": type(backend.attention).__name__,
    }


def status_bytes(field: str) -> int:
    """Return a memory figure of this process from /proc/self/status, in bytes.

    `field` is "VmRSS" for resident memory, or "VmHWM" for its peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def reset_peak() -> int:
    """Set the peak VmHWM to the present resident memory, and return that memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # see proc(5)
    return status_bytes("VmRSS")


def kind(machine: dict[str, str | int]) -> str:
    """Return a part of a file name for a `describe` result, such as "amd-epyc-avx2-1thread".

    "threads" is optional in `machine`.
    """
    threads = f"{machine['threads']}thread" if "threads" in machine else ""
    text = f"{machine['cpu']} {machine['instruction_set']} {threads}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _cpu_field(name: str) -> str:
    """Return a field of the first CPU in /proc/cpuinfo, or "" if the field is missing."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.split("\t")[0] == name), ""
    )
