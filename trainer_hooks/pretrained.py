"""load_pretrained: loads a Hugging Face checkpoint that a setting names, or raises one clear error.

Used by the training job, the doctor and RewardModel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.models.checkpoints.smollm2 import model_directory


def load_pretrained(kind: Any, setting: str, path: str, **options: Any) -> Any:
    """Return `kind.from_pretrained(path, **options)`; `kind` is an Auto class of transformers.

    The path may be "smollm2" (`model_directory`).

    Raises ConfigError, which names `setting`, if there is nothing at `path` that it can load.
    """
    try:
        return kind.from_pretrained(model_directory(path), **options)
    except (OSError, ValueError) as error:
        if not Path(path).is_dir():
            raise ConfigError(
                f"{setting}={path} is neither a directory nor a downloaded model; give a "
                "directory with a Hugging Face checkpoint and its tokenizer"
            ) from error
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{setting}={path}: {kind.__name__} cannot load it: {reason}") from error
