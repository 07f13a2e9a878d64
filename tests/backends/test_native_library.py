"""load_library: kernels are compiled once, kept in a private folder, and optional."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from rollout.backends.cpu.attention import NativePagedAttention
from rollout.backends.cpu.backend import cpu_backend
from rollout.backends.cpu.library import load_library
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
