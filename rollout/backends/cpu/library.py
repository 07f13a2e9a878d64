"""Build the C kernels with the system's compiler, once per machine and version, and load them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from rollout.backends.cpu.user_cache import private_folder

logger = logging.getLogger(__name__)

SWITCH = "ROLLOUT_NATIVE"  # "0" turns the kernels off
_FOLDER = Path(__file__).parent / "native"
# No -ffast-math: the kernels tell NaN and infinity apart. Vectors are explicit in the source, and
# so are products that are one instruction with a sum: the same bits whatever -march is.
_FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off"),
    *("-std=gnu11", "-fvisibility=hidden", "-shared", "-fPIC"),
)
_COMPILE_TIMEOUT_S = 120
_PRICE = "using torch, which is 2 to 3 times slower"


def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None, with one log line that says why.

    None if ROLLOUT_NATIVE=0, without a C compiler, or where compiling or loading fails.
    """
    if os.environ.get(SWITCH) == "0":
        logger.info("native kernels: off (%s=0); using torch", SWITCH)
        return None
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning("native kernels: off (no C compiler found: install gcc); %s", _PRICE)
        return None
    started = time.monotonic()
    try:
        path, was_built = _build(compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("native kernels: off (%s); %s", str(detail).strip(), _PRICE)
        return None
    how = "compiled" if was_built else "loaded"
    logger.info("native kernels: %s %s (%.2f s)", how, path, time.monotonic() - started)
    return library


def _build(compiler: str) -> tuple[Path, bool]:
    """(the shared object of these sources, compiler, flags and CPU; whether it was made now)."""
    sources = sorted(_FOLDER.glob("*.c"))
    path = private_folder("native") / f"{_digest(compiler, sources)}.so"
    if path.exists():
        return path, False
    # Compiled beside its place and renamed: another process sees all of it or nothing.
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        _compile([compiler, *_FLAGS, *map(str, sources), "-o", unfinished, "-lm"])
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path, True


def _compile(command: list[str]) -> None:
    """With OpenMP, or for one thread in `decoder.c` and `exchange` where the compiler has none."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _COMPILE_TIMEOUT_S}
    if subprocess.run([*command, "-fopenmp"], **options).returncode:
        subprocess.run(command, check=True, **options)


def _digest(compiler: str, sources: list[Path]) -> str:
    digest = hashlib.sha256("\0".join((compiler, *_FLAGS, cpu_identity())).encode())
    for file in (*sources, *sorted(_FOLDER.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def cpu_identity() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split("\t")[0].strip() in names)
