"""Build the C kernels with the system's compiler, once per machine and version, and load them.

`rollout.backends.cpu.backend` calls `load_library`. The shared object is written to the user's
cache directory, and read from there afterwards.
"""

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

SWITCH = "ROLLOUT_NATIVE"  # environment variable; "0" turns the kernels off
_FOLDER = Path(__file__).parent / "native"
# No -ffast-math: the kernels distinguish NaN and infinity. Vectors and fused multiply-adds are
# explicit in the source, so that results have the same bits for each -march.
_FLAGS = (
    *("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off"),
    *("-std=gnu11", "-fvisibility=hidden", "-shared", "-fPIC"),
)
_COMPILE_TIMEOUT_S = 120
_FALLBACK = "using torch, which is 2 to 3 times slower"


def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels.

    Returns None, and logs the reason in one line, if ROLLOUT_NATIVE is 0, without a C compiler, or
    if compiling or loading fails.
    """
    if os.environ.get(SWITCH) == "0":
        logger.info("native kernels: off (%s=0); using torch", SWITCH)
        return None
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning("native kernels: off (no C compiler found: install gcc); %s", _FALLBACK)
        return None
    started = time.monotonic()
    try:
        path, was_built = _build(compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("native kernels: off (%s); %s", str(detail).strip(), _FALLBACK)
        return None
    how = "compiled" if was_built else "loaded"
    logger.info("native kernels: %s %s (%.2f s)", how, path, time.monotonic() - started)
    return library


def _build(compiler: str) -> tuple[Path, bool]:
    """Return the path of the shared object for these sources, compiler, flags and CPU, and whether
    it was compiled now."""
    sources = sorted(_FOLDER.glob("*.c"))
    path = private_folder("native") / f"{_digest(compiler, sources)}.so"
    if path.exists():
        return path, False
    # Compile to another name, then rename: other processes see a whole file or none.
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    os.close(handle)
    try:
        _compile([compiler, *_FLAGS, *map(str, sources), "-o", unfinished, "-lm"])
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path, True


def _compile(command: list[str]) -> None:
    """Run the compile command with OpenMP, or without it if the compiler lacks it. All kernels then
    run on one thread, except where Python splits the work."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _COMPILE_TIMEOUT_S}
    if subprocess.run([*command, "-fopenmp"], **options).returncode:
        subprocess.run(command, check=True, **options)


def _digest(compiler: str, sources: list[Path]) -> str:
    digest = hashlib.sha256("\0".join((compiler, *_FLAGS, _cpu_identity())).encode())
    for file in (*sources, *sorted(_FOLDER.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def _cpu_identity() -> str:
    """Return a text that identifies the CPU type, on which -march=native depends. It is part of the
    digest, because different machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split("\t")[0].strip() in names)
