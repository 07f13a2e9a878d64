"""Error texts and names for paths that should be Hugging Face model directories.

Used by `rollout.models.checkpoints.loading`, `rollout.cli.models`, `rollout.serve.server` and
`rollout_vllm.engine`. Imports no torch, so that command lines answer at once.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from rollout.models.checkpoints.smollm2 import NAME as SMOLLM2

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def fault_of_directory(path: str | Path) -> str | None:
    """Return why `path` has no model, and a remedy; None if it is a directory with config.json. The
    text begins with `path`, so that it can follow "model="."""
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
    """Return the last part of the directory's absolute path, so that "." also gets a name."""
    return os.path.basename(os.path.abspath(path))
