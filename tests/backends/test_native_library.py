"""load_library: a wheel's kernels, or those compiled once and kept in a private folder."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollout.backends.cpu import library as library_module
from rollout.backends.cpu.attention import NativePagedAttention
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.library import (
    FOLDER,
    TARGETS,
    bundled_path,
    cpu_flags,
    find_bundled,
    load_library,
)
from rollout.backends.cpu.linear_ops import CpuOps
from rollout.backends.cpu.ops import NativeOps
from rollout.backends.cpu.torch_sdpa import TorchSdpaAttention
from tests.contracts.implementations import kernels


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder.

    The kernels are switched on, and the compiler copies those that this machine has compiled:
    compiling them takes twelve seconds.
    """
    monkeypatch.delenv("ROLLOUT_NATIVE", raising=False)
    library = load_library()
    if library is None:
        pytest.skip("no native kernels on this machine")
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nexec cp {library._name} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def wheel_folder(tmp_path: Path) -> Path:
    """Return a copy of the sources with an empty library for each target."""
    folder = tmp_path / "native"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.so"))
    for target in TARGETS:
        bundled_path(folder, target).touch()
    return folder


def fake_compiler(cache_home: Path, script: str) -> Path:
    """Put a line of shell before the commands of the compiler of `cache_home`; return its path."""
    compiler = cache_home.parent / "compiler"
    first, rest = compiler.read_text().split("\n", 1)
    compiler.write_text(f"{first}\n{script}\n{rest}")
    return compiler


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def last_line(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.records[-1].getMessage()


def test_load_library_compiles_once_and_then_loads(
    cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert load_library() is not None
    assert "compiled" in last_line(caplog)
    assert load_library() is not None
    assert "loaded" in last_line(caplog)
    assert [path.suffix for path in (cache_home / "rollout" / "native").iterdir()] == [".so"]


V3 = (
    "fpu vme sse sse2 pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt xsave avx f16c lahf_lm abm "
    "bmi1 avx2 bmi2"
)
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("", None),  # not x86-64, or no /proc
        (V3.replace(" fma", ""), None),
        (V3, "x86-64-v3"),
        (V3 + " avx512f avx512cd", "x86-64-v3"),  # Xeon Phi
        (V3 + " avx_vnni amx_tile", "x86-64-v3"),
        (V4, "x86-64-v4"),
        (V4 + " amx_tile amx_bf16", "x86-64-v4"),
        (V4 + " avx512_bf16 avx512_vnni", "x86-64-v4-bf16"),
        (V4 + " avx512_bf16 amx_tile amx_int8", "x86-64-v4-bf16"),
        (V4 + " avx512_bf16 amx_tile amx_bf16 amx_int8", "x86-64-v4-amx"),
    ],
)
def test_find_bundled_chooses_by_cpu_flags(
    wheel_folder: Path, flags: str, chosen: str | None
) -> None:
    path, why = find_bundled(wheel_folder, flags.split())
    assert (path and path.name.rpartition("-")[0]) == chosen
    expected = "need x86-64-v3, which this processor is not" if chosen is None else f"for {chosen}"
    assert why.endswith(expected)


def test_cpu_flags_agree_with_glibc_on_the_levels_of_x86_64() -> None:
    """The dynamic loader lists the levels that this processor has."""
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    listed = "" if not loader.exists() else subprocess.getoutput(f"{loader} --help")
    if "x86-64-v3 " not in listed:
        pytest.skip("no loader of glibc 2.33 or later for x86-64")
    for target in TARGETS[-2:]:
        supported = f"{target.name} (supported" in listed
        assert (target.cpu_flags <= cpu_flags()) == supported, target.name


def test_find_bundled_takes_the_next_target_if_a_library_is_missing(wheel_folder: Path) -> None:
    flags = (V4 + " avx512_bf16").split()
    bundled_path(wheel_folder, TARGETS[1]).unlink()
    path, _ = find_bundled(wheel_folder, flags)
    assert path == bundled_path(wheel_folder, TARGETS[2])
    for target in TARGETS[2:]:
        bundled_path(wheel_folder, target).unlink()
    path, why = find_bundled(wheel_folder, flags)
    assert (path, why) == (
        None,
        "the wheel's kernels for x86-64-v4-bf16 are missing or of other sources",
    )


@pytest.mark.parametrize("source", ["linear.c", "vectors.h"])
def test_find_bundled_never_takes_a_library_of_other_sources(
    wheel_folder: Path, source: str
) -> None:
    with (wheel_folder / source).open("a") as file:
        file.write("/* edited */\n")
    path, why = find_bundled(wheel_folder, V3.split())
    assert path is None
    assert "of other sources" in why


def test_find_bundled_of_a_source_tree_has_none() -> None:
    path, why = find_bundled(FOLDER, V4.split())
    assert (path, why) == (None, "this installation has no compiled kernels")


def test_load_library_compiles_if_a_wheels_library_cannot_be_loaded(
    cache_home: Path, wheel_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The empty files are no shared objects."""
    if not TARGETS[-1].cpu_flags <= cpu_flags():
        pytest.skip("the processor is below x86-64-v3")
    caplog.set_level(logging.INFO)
    assert load_library(wheel_folder) is not None
    assert "native kernels: compiled" in last_line(caplog)
    assert ".so cannot be loaded: " in last_line(caplog)


def test_load_library_takes_a_wheels_library_and_asks_no_compiler(
    cache_home: Path,
    wheel_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fitting = next((t for t in TARGETS if t.cpu_flags <= cpu_flags()), None)
    compiled = load_library()
    if fitting is None or compiled is None:
        pytest.skip("the processor is below x86-64-v3")
    shutil.copy(compiled._name, bundled_path(wheel_folder, fitting))
    monkeypatch.setenv("CC", "false")
    caplog.set_level(logging.INFO)
    library = load_library(wheel_folder)
    assert library is not None
    assert library._name == str(bundled_path(wheel_folder, fitting))
    assert last_line(caplog).endswith(f"(from the wheel, for {fitting.name})")


def test_a_backend_uses_the_kernels() -> None:
    kernels()  # skips where there is no compiler
    backend = cpu_backend("device")
    assert isinstance(backend.ops, NativeOps)
    assert isinstance(backend.attention, NativePagedAttention)


def test_rollout_native_0_turns_to_torch_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("ROLLOUT_NATIVE", "0")
    monkeypatch.setenv("ROLLOUT_TUNE", "0")
    backend = cpu_backend("device")
    assert type(backend.ops) is CpuOps
    assert type(backend.attention) is TorchSdpaAttention
    assert "ROLLOUT_NATIVE=0" in last_line(caplog)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_load_library_without_a_compiler_warns_and_returns_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.delenv("ROLLOUT_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert load_library() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C compiler found: install gcc" in record.getMessage()
    assert "slower" in record.getMessage()


def test_load_library_with_a_failing_compiler_warns_and_leaves_no_file(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    assert load_library() is None
    assert caplog.records[-1].levelno == logging.WARNING
    assert not list((cache_home / "rollout" / "native").iterdir())


def test_load_library_warns_with_the_compilers_error(
    cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(cache_home, "echo no such option >&2; exit 1")
    assert load_library() is None
    (warning,) = warnings_of(caplog)
    assert "(this installation has no compiled kernels; no such option)" in warning


def test_load_library_waits_for_a_compiler_that_uses_no_processor_time(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that is busy with other things."""
    monkeypatch.setattr(library_module, "_COMPILE_CPU_S", 1)
    fake_compiler(cache_home, "sleep 1.5")
    assert load_library() is not None
    assert not warnings_of(caplog)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 alone has AVX")
def test_the_kernels_compile_for_a_processor_without_avx(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or pytest.skip("no gcc")
    sources = map(str, FOLDER.glob("*.c"))
    command = [compiler, "-O0", "-std=gnu11", "-w", "-march=x86-64", "-c", *sources]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BURN = "while :; do :; done"


@pytest.mark.parametrize("script", [BURN, f"sh -c '{BURN}'"], ids=["itself", "its process"])
def test_load_library_ends_a_compiler_at_its_limit_of_processor_time(
    cache_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
) -> None:
    monkeypatch.setattr(library_module, "_COMPILE_CPU_S", 1)
    compiler = fake_compiler(cache_home, f"{script}; exit $?")
    assert load_library() is None
    (warning,) = warnings_of(caplog)
    assert f"{compiler} used 1 s of processor time, the limit of a compilation: set CC" in warning
    assert "slower" in warning
    assert not list((cache_home / "rollout" / "native").iterdir())


def test_load_library_ends_the_systems_compiler_at_its_limit_of_processor_time(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The source includes itself 2 to the power of 60 times."""
    source = cache_home.parent / "sources" / "endless.c"
    source.parent.mkdir()
    include = '#include "endless.c"\n' * 2
    source.write_text(f"#if __INCLUDE_LEVEL__ < 60\n{include}#endif\n")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(library_module, "_COMPILE_CPU_S", 1)
    assert load_library(source.parent) is None
    (warning,) = warnings_of(caplog)
    assert "used 1 s of processor time, the limit of a compilation" in warning


def test_load_library_ends_a_compiler_that_hangs_and_its_processes(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No process keeps the pipe open for writing after the warning."""
    pipe = cache_home.parent / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(library_module, "_COMPILE_WALL_S", 0.5)
    fake_compiler(cache_home, f"exec 3>{pipe}; echo >&3; sleep 1000; exit 1")
    assert load_library() is None
    (warning,) = warnings_of(caplog)
    assert "did not end within 0.5 s, the limit of a compilation: set CC" in warning
    os.set_blocking(reader, True)
    while os.read(reader, 100):  # until the last writer has ended
        pass
    os.close(reader)


def test_load_library_without_openmp_warns_that_most_kernels_use_one_thread(
    cache_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = "unsupported option -fopenmp"
    script = f'case "$*" in *-fopenmp*) echo {refusal} >&2; exit 1;; esac'
    fake_compiler(cache_home, script)
    assert load_library() is not None
    (warning,) = warnings_of(caplog)
    assert "use one thread; install OpenMP" in warning
    assert refusal in warning


class Signals(logging.Handler):
    """Sets an event when a line with this text is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.is_logged = text, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.is_logged.set()


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_load_library_in_processes_that_start_together_compiles_once(
    cache_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: bool,
) -> None:
    """Threads here: each opens the lock's file, as a process does. The compiler runs until the
    second thread waits."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(library_module, "_LOCK_POLL_S", 0.001)
    monkeypatch.setattr(library_module, "_COMPILE_CPU_S", 1)
    runs, gate = cache_home.parent / "runs", cache_home.parent / "gate"
    os.mkfifo(gate)
    script = f"echo run >>{runs}; read line <{gate}"
    fake_compiler(cache_home, f"{script}; {BURN}" if fails else script)
    waiting = Signals("another process compiles them; waiting")
    logger = logging.getLogger(library_module.__name__)
    logger.addHandler(waiting)
    try:
        with ThreadPoolExecutor(2) as threads:
            loads = [threads.submit(load_library) for _ in range(2)]
            assert waiting.is_logged.wait(100)
            gate.write_text("go\n")
            loaded = [load.result() for load in loads]
    finally:
        logger.removeHandler(waiting)
    assert [each is None for each in loaded] == [fails, fails]
    assert runs.read_text() == "run\n"
    warnings = warnings_of(caplog)
    assert len(warnings) == 2 * fails
    assert all("used 1 s of processor time" in warning for warning in warnings)
    left = [path.suffix for path in (cache_home / "rollout" / "native").iterdir()]
    assert left == ([] if fails else [".so"])


def test_load_library_warns_of_a_lock_that_another_process_keeps(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_library() is not None
    (compiled,) = (cache_home / "rollout" / "native").iterdir()
    compiled.unlink()
    monkeypatch.setattr(library_module, "_COMPILE_WALL_S", 0.2)
    with compiled.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert load_library() is None
    (warning,) = warnings_of(caplog)
    assert f"another process has held {lock.name} for 0.2 s" in warning


def test_load_library_compiles_where_the_file_system_has_no_locks(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert load_library() is not None
    assert not warnings_of(caplog)


def test_load_library_ignores_a_cache_that_others_can_write(cache_home: Path) -> None:
    shared = cache_home / "rollout" / "native"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    assert load_library() is not None
    assert not list(shared.iterdir())


def test_kernels_split_covers_all_items_once() -> None:
    compiled = kernels()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for num_items, smallest in ((10, 1), (10, 4), (2, 1), (1, 1), (7, 100)):
            seen: list[tuple[int, int]] = []
            compiled.split(
                num_items, lambda first, last, to=seen: to.append((first, last)), smallest
            )
            covered = [item for first, last in sorted(seen) for item in range(first, last)]
            assert covered == list(range(num_items))
            assert len(seen) == max(1, min(3, num_items // smallest))
    finally:
        torch.set_num_threads(before)
