"""Checkpoints of a training run, and versions for its weights that are never used twice."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rollout.errors import ConfigError
from trainer_hooks.files import replace_directory, replace_text

_DIRECTORY_NAME = re.compile(r"step_(\d+)")
_STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.pt"
_RNG_FILE = "rng_state.pt"


class SavesPretrained(Protocol):
    """A transformers model or tokenizer."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the files that `from_pretrained` reads."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where a run stands. `step` training steps are done; `weights_version` is the last one used.

    `prompts`: the state of the prompt source, its position and what was given out unfinished; it
    must be JSON.
    """

    step: int
    weights_version: int
    prompts: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(
    root: Path | str,
    state: TrainerState,
    policy: SavesPretrained,
    optimizer: torch.optim.Optimizer,
    tokenizer: SavesPretrained | None = None,
    keep: int = 2,
) -> Path:
    """Write `root`/step_<step>: a Hugging Face directory with the trainer's state beside it.

    It is complete or absent: everything is written to a hidden directory that is then renamed.
    The random states of torch, numpy and Python are saved too. Of the checkpoints up to this step
    the `keep` newest stay, this one among them; those of later steps are left alone. Returns the
    checkpoint's directory. Raises ConfigError for `keep` below 1.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep} must be at least 1, for the checkpoint that is written")
    root = Path(root)
    target = root / f"step_{state.step:06d}"
    staging = root / f".{target.name}.tmp"
    for abandoned in root.glob(".step_*"):
        shutil.rmtree(abandoned)
    staging.mkdir(parents=True)
    policy.save_pretrained(str(staging))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(staging))
    torch.save(optimizer.state_dict(), staging / _OPTIMIZER_FILE)
    torch.save(_random_states(), staging / _RNG_FILE)
    (staging / _STATE_FILE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
    replace_directory(staging, target)
    older = [path for path in _checkpoints(root) if _step_of(path) < state.step]
    for outdated in older[::-1][keep - 1 :]:
        shutil.rmtree(outdated)
    return target


def find_checkpoint(root: Path | str) -> Path | None:
    """The checkpoint of the highest step under `root`; None if there is none."""
    return next(iter(reversed(_checkpoints(Path(root)))), None)


def read_trainer_state(checkpoint: Path | str) -> TrainerState:
    """The state saved in a checkpoint. Raises ConfigError if the directory is none."""
    path = Path(checkpoint) / _STATE_FILE
    if not path.exists():
        raise ConfigError(f"{checkpoint} is no checkpoint of a trainer: it has no {_STATE_FILE}")
    return TrainerState(**json.loads(path.read_text(encoding="utf-8")))


def load_checkpoint(checkpoint: Path | str, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Restore `optimizer` and the random states of torch, numpy and Python; returns the state.

    The policy is loaded by `from_pretrained(checkpoint)`, before its optimizer is made.
    Raises ConfigError if the directory is no checkpoint, or one of a run with other parameters.
    """
    state = read_trainer_state(checkpoint)
    saved = torch.load(Path(checkpoint) / _OPTIMIZER_FILE, weights_only=True)
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        own, theirs = (
            [len(group["params"]) for group in groups]
            for groups in (optimizer.param_groups, saved["param_groups"])
        )
        raise ConfigError(
            f"{checkpoint} has an optimizer of {theirs} parameters per group, this run one of "
            f"{own}; resume with the settings that the run began with, or start a run of its own"
        ) from error
    _restore_random_states(torch.load(Path(checkpoint) / _RNG_FILE, weights_only=True))
    return state


class WeightsVersionCounter:
    """Hands out weights versions and remembers the highest in a file.

    A trainer that resumes from an older checkpoint must not use a version again that an engine has
    seen with other weights: rollouts of the lost steps may still carry it.
    `floor`: the highest version known from elsewhere, of a checkpoint say.
    """

    def __init__(self, path: Path | str, floor: int = 0) -> None:
        self._path = Path(path)
        recorded = int(self._path.read_text(encoding="utf-8")) if self._path.exists() else 0
        self._highest = max(recorded, floor)

    @property
    def highest(self) -> int:
        """The highest version handed out so far."""
        return self._highest

    def reserve(self) -> int:
        """The next version; it is on the disk before anyone can use it."""
        self._highest += 1
        replace_text(self._path, f"{self._highest}\n")
        return self._highest


def _checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, by step."""
    found = [path for path in root.glob("step_*") if _DIRECTORY_NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _random_states() -> dict[str, Any]:
    """Tensors, numbers and tuples only, so that they load with `weights_only`."""
    algorithm, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def _restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    algorithm, keys, *rest = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
