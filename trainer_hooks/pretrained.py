"""load_pretrained: loads a model or tokenizer from the checkpoint that a setting names.

Used by `trainer_hooks.train.task`, `trainer_hooks.train.adapter`, `trainer_hooks.doctor.command`
and `trainer_hooks.rewards.reward_model`. transformers may download a model into its cache, and the
first use of "smollm2" writes a converted copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.models.checkpoints.smollm2 import model_directory


def load_pretrained(kind: Any, setting: str, path: str, **options: Any) -> Any:
    """Return `kind.from_pretrained(path, **options)`.

    `kind`: an Auto class of transformers, or another class with `from_pretrained`.
    `setting`: name of the setting that gave `path`, for the error message.
    `path`: a directory, a name on the Hugging Face Hub, or "smollm2" (see `model_directory`).
    Raises ConfigError if `kind` cannot load `path`.
    """
    try:
        return kind.from_pretrained(model_directory(path), **options)
    except (OSError, ValueError) as error:
        if not Path(path).is_dir():
            raise ConfigError(
                f"{setting}={path} is neither a directory nor a downloaded model; give a directory "
                "with a Hugging Face checkpoint and its tokenizer, as `hf download NAME "
                "--local-dir DIR` makes it"
            ) from error
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{setting}={path}: {kind.__name__} cannot load it: {reason}") from error
