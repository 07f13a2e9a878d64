"""Describes the machine of a measurement: processor and versions, but no host name.

Used by the programs of this folder. Also reads and resets this process's memory figures in /proc.
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
    """Return processor, versions, threads, and the classes of the backend that `config` selects."""
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
    """Return a figure of this process in /proc/self/status, in bytes. VmRSS is the resident
    memory, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def reset_peak() -> int:
    """Let VmHWM begin again at the resident memory (see proc(5)). Returns that memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def kind(machine: dict[str, str | int]) -> str:
    """Return a part of a file name, such as "amd-epyc-avx2-1thread", for a `describe` result.
    "threads" may be missing."""
    threads = f"{machine['threads']}thread" if "threads" in machine else ""
    text = f"{machine['cpu']} {machine['instruction_set']} {threads}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _cpu_field(name: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; "" if there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.split("\t")[0] == name), ""
    )
