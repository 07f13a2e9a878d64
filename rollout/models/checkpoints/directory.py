"""Functions that name a Hugging Face model directory, and say what keeps a path from being one.

Used by `rollout.models.checkpoints.loading`, `rollout.cli.models` and `rollout_vllm.engine` for
their errors, and by `rollout.cli.models` and `rollout.serve.server` for names. Imports no torch, so
that a command line is answered at once.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from rollout.models.checkpoints.smollm2 import NAME as SMOLLM2

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def fault_of_directory(path: str | Path) -> str | None:
    """Return the reason why `path` has no model, with the remedy. Returns None if it is a directory
    with config.json. The text begins with `path`, to follow "model="."""
    text, directory = str(path), Path(path)
    if directory.is_dir():
        if (directory / "config.json").is_file():
            return None
        return f"{text} has no config.json; give a Hugging Face model directory"
    if directory.exists():
        return (
            f"{text} is a file; give the directory with config.json and *.safetensors (GGUF files "
            "are not read)"
        )
    if _HUB_NAME.fullmatch(text) and not directory.parent.exists():
        name = directory.name
        return (
            f"{text} is a name of the Hugging Face hub, and models are not downloaded here: run "
            f"`hf download {text} --local-dir {name}`, then give {name}"
        )
    if get_close_matches(text.lower(), [SMOLLM2], cutoff=0.7):
        return f"{text} is not a directory; did you mean {SMOLLM2}?"
    return (
        f"{text} is not a directory; models are not downloaded here: give a directory with "
        "config.json and *.safetensors, as `hf download NAME --local-dir DIR` makes it"
    )


def name_of_directory(path: str | Path) -> str:
    """Return the last part of the directory's absolute path, so that "." has a name, too."""
    return os.path.basename(os.path.abspath(path))
