"""Reads JSON files whose content is an object, such as a model's config.json.

Used by `rollout.models.checkpoints.reader`, `rollout.text`, `rollout.serve.generation_config` and
`rollout.cli.models`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError, RolloutError


def read_object(path: Path, error: type[RolloutError] = ConfigError) -> dict[str, Any]:
    """Return the object in the file `path`. Raises `error`, naming the file, if the file holds
    anything else, and OSError if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise error(f"{path} is not valid JSON: {fault}") from fault
    if not isinstance(content, dict):
        raise error(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def read_optional_object(path: Path) -> dict[str, Any]:
    """Return the object in the file `path`, or {} if there is no such file. Raises ConfigError if
    the file holds anything else."""
    return read_object(path) if path.is_file() else {}
