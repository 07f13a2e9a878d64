"""A machine without a C compiler: the engine works, and a warning says at what price."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rollout.backends.cpu.library import SWITCH, load_library


def test_a_missing_compiler_is_a_warning_with_its_price(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "rollout.backends.cpu.library")
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_library() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no C compiler found: install gcc" in record.getMessage()
    assert "slower" in record.getMessage()


def test_kernels_that_are_switched_off_are_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "rollout.backends.cpu.library")
    monkeypatch.setenv(SWITCH, "0")
    assert load_library() is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
