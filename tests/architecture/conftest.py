"""The project's own modules, and a writer of made-up trees that break the rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture.imports import Module, read_tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    return read_tree(ROOT)


@pytest.fixture
def made_up(tmp_path: Path) -> Callable[[dict[str, str]], list[Module]]:
    """Write {path: source} below tmp_path and read it as a project tree."""

    def write(files: dict[str, str]) -> list[Module]:
        for path, source in files.items():
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source, encoding="utf-8")
        return read_tree(tmp_path)

    return write
