"""The compiled CPU kernels: loads a library from the wheel, or compiles one.

`rollout.backends.cpu.backend` and benchmarks call `load_library`, which logs the library and why it
was chosen. `scripts.build_wheel` calls `build_bundled`. A wheel has a library for each of
`TARGETS`. If no library fits the processor, the system's compiler builds one at first use, which is
kept in the user's cache directory. The kernels are plain C and use no API of Python or torch. A
wheel's libraries use torch's OpenMP.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rollout.backends.cpu.user_cache import private_folder, try_lock

logger = logging.getLogger(__name__)

SWITCH = "ROLLOUT_NATIVE"  # environment variable; "0" turns the kernels off
FOLDER = Path(__file__).parent / "native"  # of the sources, and of a wheel's libraries
_CPU_INFO = Path("/proc/cpuinfo")
# No -ffast-math: the kernels distinguish NaN and infinity. Vectors and fused multiply-adds are
# explicit in the source, so that results have the same bits for each -march.
_FLAGS = (
    *("-O3", "-fno-math-errno", "-ffp-contract=off"),
    *("-std=gnu11", "-fvisibility=hidden", "-fPIC"),
)
_HERE = ("-march=native",)
# The compiler needs 20 s of processor time in all. A busy machine makes that many minutes, so the
# limit of a compiler that does not end is of processor time, for each of its processes. The limit
# of wall-clock time is for a compiler that waits for something.
_COMPILE_CPU_S, _COMPILE_WALL_S = 300, 1800.0
_CPU_LIMIT_EXIT_CODES = (-signal.SIGXCPU, 128 + signal.SIGXCPU)  # of the compiler, or of a script
_CPU_LIMIT_TEXT = re.compile("cpu ?time limit exceeded", re.IGNORECASE)  # of a compiler's driver
_LIMIT_REMEDY = "set CC to another compiler, or install a wheel that has the kernels"
_LOCK_POLL_S = 0.1
_FALLBACK = "using torch, which is 2 to 3 times slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of x86-64 processor that wheels have a library for. `name` is the first part of the
    library's file name. `options` are for GCC and Clang. `cpu_flags` are features that the
    processor must have, as /proc/cpuinfo names them."""

    name: str
    options: tuple[str, ...]
    cpu_flags: frozenset[str]


class CompileError(Exception):
    """The compiler refused the sources, or reached a limit."""


class CompileLimitError(CompileError):
    """The compiler reached a limit of time."""


# Levels of the x86-64 psABI. Of v4's processors those from 2022 on also multiply pairs of bfloat16
# numbers, which doubles the speed of many rows.
_V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
_V3 = f"{_V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
_V4 = f"{_V3} avx512bw avx512cd avx512dq avx512f avx512vl"
_BF16 = f"{_V4} avx512_bf16"
_BF16_OPTIONS = ("-march=x86-64-v4", "-mavx512bf16")
# The best first.
TARGETS = (
    Target(
        name="x86-64-v4-amx",
        options=(*_BF16_OPTIONS, "-mamx-tile", "-mamx-bf16"),
        cpu_flags=frozenset(f"{_BF16} amx_tile amx_bf16".split()),
    ),
    Target(name="x86-64-v4-bf16", options=_BF16_OPTIONS, cpu_flags=frozenset(_BF16.split())),
    Target(name="x86-64-v4", options=("-march=x86-64-v4",), cpu_flags=frozenset(_V4.split())),
    Target(name="x86-64-v3", options=("-march=x86-64-v3",), cpu_flags=frozenset(_V3.split())),
)


def load_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Return the kernels, or None if there are none. Log in one line which library was loaded, or
    why none was. `folder` has the sources, and the libraries of a wheel. Returns None if
    ROLLOUT_NATIVE=0, or if there is neither a library that fits nor a C compiler that works."""
    if os.environ.get(SWITCH) == "0":
        logger.info("native kernels: off (%s=0); using torch", SWITCH)
        return None
    path, why = find_bundled(folder, cpu_flags())
    if path is not None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            why = f"{path.name} cannot be loaded: {error}"
        else:
            logger.info("native kernels: loaded %s (%s)", path, why)
            return library
    return _compiled_library(folder, why)


def find_bundled(folder: Path, flags: Collection[str]) -> tuple[Path | None, str]:
    """Return the library in `folder` for a processor with these flags, and the reason for it.

    The library is the first of TARGETS that the processor can run and that was compiled from the
    present sources in `folder`. If there is none, the result is None and the reason says what is
    missing.
    """
    if not any(folder.glob("*.so")):
        return None, "this installation has no compiled kernels"
    fitting = [target for target in TARGETS if target.cpu_flags <= set(flags)]
    if not fitting:
        return None, f"the wheel's kernels need {TARGETS[-1].name}, which this processor is not"
    for target in fitting:
        path = bundled_path(folder, target)
        if path.exists():
            return path, f"from the wheel, for {target.name}"
    return None, f"the wheel's kernels for {fitting[0].name} are missing or of other sources"


def bundled_path(folder: Path, target: Target) -> Path:
    """Return where a wheel has the library of `target`. The file name has a digest of the
    sources."""
    return folder / f"{target.name}-{_digest(folder, *_FLAGS, *target.options)}.so"


def cpu_flags() -> frozenset[str]:
    """Return the processor's features that the system has enabled. The set is empty unless this is
    x86-64 Linux."""
    lines = (line.partition(":") for line in _cpu_lines())
    return next(
        (frozenset(words.split()) for name, _, words in lines if name.strip() == "flags"),
        frozenset(),
    )


def build_bundled(folder: Path, compiler: str) -> Iterator[Path]:
    """Compile the library of each of TARGETS beside the sources in `folder`. Yield the libraries'
    paths. Raises CalledProcessError."""
    # Not linked with OpenMP: torch's own OpenMP, which every process has loaded for all libraries,
    # serves them, whatever its file is called.
    for target in TARGETS:
        path = bundled_path(folder, target)
        with tempfile.TemporaryDirectory() as objects:
            compile_only = (compiler, *_FLAGS, *target.options, "-fopenmp", "-c")
            _run([*compile_only, *map(str, _sources(folder))], cwd=objects)
            parts = sorted(map(str, Path(objects).glob("*.o")))
            _run([compiler, "-shared", *parts, "-o", str(path), "-lm"])
        yield path


def _compiled_library(folder: Path, why: str) -> ctypes.CDLL | None:
    """Return the kernels that the system's compiler builds for this machine. Return None, with a
    warning, if it fails or reaches a limit of time. `why` is the reason that no library of a wheel
    is loaded, for the log."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning(
            "native kernels: off (%s, and no C compiler found: install gcc); %s", why, _FALLBACK
        )
        return None
    started = time.monotonic()
    try:
        path, was_built = _build(folder, compiler)
        library = ctypes.CDLL(str(path))
    except (OSError, CompileError) as error:
        logger.warning("native kernels: off (%s; %s); %s", why, error, _FALLBACK)
        return None
    how = "compiled" if was_built else "loaded"
    logger.info("native kernels: %s %s (%.2f s; %s)", how, path, time.monotonic() - started, why)
    return library


def _build(folder: Path, compiler: str) -> tuple[Path, bool]:
    """Return the path of the shared object for these sources, compiler, flags and CPU, and whether
    it was compiled now. Raises CompileError. If several processes start together, one compiles, and
    the others wait for its shared object or its error."""
    flags = (*_FLAGS, *_HERE)
    path = private_folder("native") / f"{_digest(folder, compiler, *flags, *_cpu_identity())}.so"
    if path.exists():
        return path, False
    lock = path.with_suffix(".lock")
    with lock.open("a+") as file:
        _acquire(file)
        try:
            file.seek(0)
            if path.exists():
                return path, False
            if failure := file.read():
                raise CompileError(failure)
            logger.info("native kernels: compiling them with %s, once", compiler)
            try:
                _compile([compiler, *flags], folder, path)
            except CompileError as error:
                file.write(str(error))
                raise
        finally:
            # Processes that wait have the file open; a later start makes another, and tries again.
            lock.unlink(missing_ok=True)
    return path, True


def _acquire(file: TextIO) -> None:
    """Lock `file` until it is closed. On a file system without locks, leave it unlocked. Raises
    CompileLimitError if another process keeps it locked."""
    end = None
    while not try_lock(file):
        if end is None:
            logger.info("native kernels: another process compiles them; waiting (%s)", file.name)
            end = time.monotonic() + _COMPILE_WALL_S
        elif time.monotonic() >= end:
            raise CompileLimitError(
                f"another process has held {file.name} for {_COMPILE_WALL_S:g} s, the limit of a "
                "compilation: end that process"
            )
        time.sleep(_LOCK_POLL_S)


def _compile(command: list[str], folder: Path, path: Path) -> None:
    """Compile the sources in `folder` into the shared object `path`. `command` has compiler and
    flags. OpenMP is left out if the compiler lacks it. Raises CompileError."""
    # Compile to another name, then rename: other processes see a whole file or none.
    handle, unfinished = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    os.close(handle)
    command = [*command, "-shared", *map(str, _sources(folder)), "-o", unfinished, "-lm"]
    try:
        try:
            _run_limited([*command, "-fopenmp"])
        except CompileLimitError:
            raise
        except CompileError as error:
            _run_limited(command)
            logger.warning(
                "native kernels: %s compiles without OpenMP only, so most of them use one thread; "
                "install OpenMP and remove %s (%s)",
                *(command[0], path, error),
            )
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _run_limited(command: list[str]) -> None:
    """Run the compiler with limits on CPU and wall-clock time. Raises CompileError."""
    # The shell sets the limit, and all processes of the compiler inherit it. preexec_fn is unsafe
    # in a process that has threads.
    limit = f'ulimit -c 0; ulimit -S -t {_COMPILE_CPU_S}; exec "$@"'
    with subprocess.Popen(
        ["/bin/sh", "-c", limit, "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"LC_ALL": "C"},  # for _CPU_LIMIT_TEXT
        start_new_session=True,
    ) as process:
        try:
            _, printed = process.communicate(timeout=_COMPILE_WALL_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the compiler and its processes
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompileLimitError(
                    f"{command[0]} did not end within {_COMPILE_WALL_S:g} s, the limit of a "
                    f"compilation: {_LIMIT_REMEDY}"
                ) from None
            raise
    if process.returncode == 0:
        return
    if process.returncode in _CPU_LIMIT_EXIT_CODES or _CPU_LIMIT_TEXT.search(printed):
        raise CompileLimitError(
            f"{command[0]} used {_COMPILE_CPU_S} s of processor time, the limit of a compilation: "
            f"{_LIMIT_REMEDY}"
        )
    raise CompileError(printed.strip() or f"{command[0]} ended with {process.returncode}")


def _run(command: list[str], **options: Any) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, **options)


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.c"))


def _digest(folder: Path, *words: str) -> str:
    """Return a digest of `words` and of the names and contents of all sources."""
    digest = hashlib.sha256("\0".join(words).encode())
    for file in (*_sources(folder), *sorted(folder.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:32]


def _cpu_lines() -> list[str]:
    """Return the lines of /proc/cpuinfo about the first processor; [] if the file is missing."""
    try:
        return _CPU_INFO.read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return []


def _cpu_identity() -> list[str]:
    """Return lines that identify the CPU type, on which -march=native depends."""
    # Part of the digest, because different machines may share a home folder.
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    lines = [line for line in _cpu_lines() if line.split("\t")[0].strip() in names]
    return lines or [platform.machine() + platform.processor()]
