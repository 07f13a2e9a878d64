"""Reads JSON files that hold an object, such as those of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError, RolloutError


def read_object(path: Path, error: type[RolloutError] = ConfigError) -> dict[str, Any]:
    """Return the object in `path`. Raises `error`, naming the file, if it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise error(f"{path} is not valid JSON: {fault}") from fault
    if not isinstance(content, dict):
        raise error(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_optional_object(path: Path) -> dict[str, Any]:
    """Return the object in `path`, or {} if there is no such file. Raises ConfigError."""
    return read_object(path) if path.is_file() else {}
