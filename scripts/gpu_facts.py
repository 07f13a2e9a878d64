"""Print facts about a CUDA machine, a line each: card, driver, cores, memory, tools and versions.

Run by `scripts.gpu_check` as its first part, and by hand. A fact that cannot be read is printed as
unknown. Exit status: 0, or 2 after a last line that says why tests cannot run here.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

NO_DEVICE = 2
TOOL_S = 5.0  # time limit of nvidia-smi, which hangs if the driver does
SMI = ["name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.mem"]
TOOLS = ("gcc", "make", "compute-sanitizer", "ncu")
PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest", "pytest-xdist", "hypothesis")


def card() -> str:
    """Return what nvidia-smi reports about each GPU, a line each."""
    query = f"--query-gpu={','.join(SMI)}"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=True)
    return done.stdout.strip()


def memory() -> str:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    wanted = ("MemTotal", "MemAvailable", "HugePages_Total", "Hugepagesize")
    return ", ".join(" ".join(line.split()) for line in lines if line.startswith(wanted))


def huge_pages() -> str:
    return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii").strip()


def path_of(tool: str) -> str:
    return shutil.which(tool) or "not installed"


def facts() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each fact, and the function that reads it."""
    yield "card", card
    yield "kernel", platform.release
    yield "cores", lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "memory", memory
    yield "huge pages", huge_pages
    for tool in TOOLS:
        yield tool, partial(path_of, tool)
    yield "python", platform.python_version
    for package in PACKAGES:
        yield package, partial(metadata.version, package)


def read_fact(read: Callable[[], str]) -> str:
    """Return the fact, or "unknown" with the error if it cannot be read."""
    try:
        return read()
    except (OSError, subprocess.SubprocessError, metadata.PackageNotFoundError) as error:
        return f"unknown ({type(error).__name__}: {error})"


def what_is_missing() -> str | None:
    """Return one line that says why this machine cannot run the check, or None if it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed for " + sys.executable
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def main() -> int:
    for name, read in facts():
        print(f"{name}: {read_fact(read)}", flush=True)
    missing = what_is_missing()
    if missing is not None:
        print(missing)
        return NO_DEVICE
    return 0


if __name__ == "__main__":
    sys.exit(main())
