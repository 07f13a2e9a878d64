"""Description of a measurement's machine: processor and versions, but no host name."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch
import transformers

from rollout import InferenceConfig
from rollout.backends.select import create_backend


def describe(config: InferenceConfig) -> dict[str, str | int]:
    """Processor, versions, threads, and the parts of our backend."""
    backend = create_backend(config)
    return {
        "cpu": _cpu_field("model name") or platform.machine(),
        "cpu_family_model": f"{_cpu_field('cpu family')}/{_cpu_field('model')}",
        "num_cores": os.cpu_count() or 0,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ops": type(backend.ops).__name__,
        "attention": type(backend.attention).__name__,
    }


def status_bytes(field: str) -> int:
    """A figure of this process in /proc/self/status: VmRSS is what is resident, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def kind(machine: dict[str, str | int]) -> str:
    """A short name for a file, such as "amd-epyc-avx2-1thread"; "threads" may be left out."""
    threads = f"{machine['threads']}thread" if "threads" in machine else ""
    text = f"{machine['cpu']} {machine['instruction_set']} {threads}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _cpu_field(name: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.split("\t")[0] == name), ""
    )
