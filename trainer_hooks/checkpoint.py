"""Checkpoints of a training run, and a counter that never uses a weights version twice.

Used by users' training loops and by `main`, `learner` and `summary` of `trainer_hooks.train`.
`trainer_hooks.doctor.command` reads checkpoints. `trainer_hooks.weight_sync.fsdp2` returns a
SavesPretrained.
Saving writes and deletes directories named step_<step>. Loading sets the random states of torch,
numpy and Python. The counter writes the highest version to a file.
"""

from __future__ import annotations

import json
import pickle
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
from trainer_hooks.files import replace_directory, replace_text, restore_directory

_DIRECTORY_NAME = re.compile(r"step_(\d+)")
NUM_KEPT = 2  # default number of checkpoints to keep
_STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.pt"
_PARAMETERS_FILE = "optimizer.json"  # the optimizer's class and the shapes of its parameters
_RNG_FILE = "rng_state.pt"
_SCHEDULER_FILE = "scheduler.pt"
_OWN_FILE = "own_state.pt"
# Errors of torch.load for truncated files. The class depends on where a file ends.
_TRUNCATED_FILE_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    pickle.UnpicklingError,
)


class SavesPretrained(Protocol):
    """A model or tokenizer with the `save_pretrained` of transformers."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the files that `from_pretrained` reads."""
        ...


class Stateful(Protocol):
    """An object whose state is saved and loaded, such as a learning-rate scheduler of torch."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class StatefulOptimizer(Stateful, Protocol):
    """An optimizer of torch, or a `WholeOptimizer`, which gathers a sharded optimizer's state."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The position of a run.

    `step`: number of training steps done.
    `weights_version`: highest weights version used.
    `prompts`: JSON-able state of the prompt source.
    """

    step: int
    weights_version: int
    prompts: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(
    root: Path | str,
    state: TrainerState,
    policy: SavesPretrained,
    optimizer: torch.optim.Optimizer | Stateful,
    tokenizer: SavesPretrained | None = None,
    keep: int = NUM_KEPT,
    *,
    scheduler: Stateful | None = None,
    own_state: Any = None,
) -> Path:
    """Write the checkpoint `root`/step_<step>, a Hugging Face directory with the trainer's state.

    A checkpoint is complete or absent, even after a kill. A checkpoint includes the random states
    of torch, its accelerators, numpy and Python. A checkpoint of the same step is replaced.
    Unfinished checkpoints of killed processes are deleted.
    `policy`, `tokenizer`: written by their `save_pretrained`. Without a tokenizer the checkpoint
    has no tokenizer files.
    `optimizer`, `scheduler`: their `state_dict()` is written. `scheduler` may be None.
    `own_state`: further state of the run as tensors, numbers, text, lists and dicts.
    `read_own_state` returns it.
    `keep`: number of checkpoints to keep, including this one. Older ones are deleted. Checkpoints
    of later steps are neither counted nor deleted.
    Returns the checkpoint's directory. Raises ConfigError for `keep` below 1, and for an
    `own_state` that `read_own_state` cannot read.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep} must be at least 1: the new checkpoint itself is kept")
    root = Path(root)
    target = root / f"step_{state.step:06d}"
    staging = root / f".{target.name}.tmp"
    restore_checkpoints(root)
    for abandoned in root.glob(".step_*.tmp"):
        shutil.rmtree(abandoned)
    staging.mkdir(parents=True)
    policy.save_pretrained(str(staging))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(staging))
    torch.save(optimizer.state_dict(), staging / _OPTIMIZER_FILE)
    if hasattr(optimizer, "param_groups"):
        described = json.dumps(_described(optimizer))
        (staging / _PARAMETERS_FILE).write_text(described, encoding="utf-8")
    torch.save(_random_states(), staging / _RNG_FILE)
    if scheduler is not None:
        torch.save(scheduler.state_dict(), staging / _SCHEDULER_FILE)
    if own_state is not None:
        torch.save(own_state, staging / _OWN_FILE)
        read_own_state(staging)
    (staging / _STATE_FILE).write_text(json.dumps(asdict(state), indent=2), encoding="utf-8")
    replace_directory(staging, target)
    older = [path for path in _checkpoints(root) if _step_of(path) < state.step]
    for outdated in older[::-1][keep - 1 :]:
        shutil.rmtree(outdated)
    return target


def restore_checkpoints(root: Path | str) -> None:
    """Restore the checkpoints under `root` whose replacement was interrupted by a kill.

    `save_checkpoint` calls this. Only the process that writes under `root` may call it.
    """
    for replaced in Path(root).glob(".step_*.old"):
        restore_directory(replaced.with_name(replaced.name[1:].removesuffix(".old")))


def find_checkpoint(root: Path | str) -> Path | None:
    """Return the directory of the checkpoint with the highest step under `root`, or None."""
    return next(iter(reversed(_checkpoints(Path(root)))), None)


def read_trainer_state(checkpoint: Path | str) -> TrainerState:
    """Return a checkpoint's TrainerState. Raises ConfigError for a missing or truncated file."""
    path = Path(checkpoint) / _STATE_FILE
    if not path.exists():
        raise ConfigError(f"{checkpoint} is not a trainer's checkpoint: it has no {_STATE_FILE}")
    try:
        return TrainerState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _truncated_file_error(path, error) from error


def read_own_state(checkpoint: Path | str) -> Any:
    """Return the `own_state` in a checkpoint's directory, or None if the checkpoint has none.

    Raises ConfigError for a truncated file, and for a file with types that `save_checkpoint` does
    not allow. Such types are never unpickled.
    """
    path = Path(checkpoint) / _OWN_FILE
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"own_state holds more than tensors, numbers, text, lists and dicts, or {path} was cut "
            f"short: {error}"
        ) from error
    except _TRUNCATED_FILE_ERRORS as error:
        raise _truncated_file_error(path, error) from error


def load_checkpoint(
    checkpoint: Path | str,
    optimizer: torch.optim.Optimizer | StatefulOptimizer,
    scheduler: Stateful | None = None,
) -> TrainerState:
    """Load the states of `optimizer`, `scheduler` and the random generators from a checkpoint.

    The random generators are those of torch, its accelerators, numpy and Python. Load the policy by
    `from_pretrained(checkpoint)` before creating its optimizer.
    Returns the run's TrainerState. Raises ConfigError, and changes nothing, if the directory is not
    a checkpoint, has a truncated file or was saved with another optimizer or other parameters. The
    same holds if `scheduler` is given but was not saved.
    """
    root = Path(checkpoint)
    state = read_trainer_state(root)
    saved = _read_tensors(root / _OPTIMIZER_FILE)
    random_states = _read_tensors(root / _RNG_FILE)
    if scheduler is not None and not (root / _SCHEDULER_FILE).exists():
        raise ConfigError(f"{checkpoint} was saved without a scheduler; load it without one")
    scheduler_state = {} if scheduler is None else _read_tensors(root / _SCHEDULER_FILE)
    _require_same_parameters(root, saved, optimizer)
    optimizer.load_state_dict(saved)
    if scheduler is not None:
        scheduler.load_state_dict(scheduler_state)
    _restore_random_states(random_states)
    return state


def _require_same_parameters(
    root: Path, saved: Mapping[str, Any], optimizer: torch.optim.Optimizer | StatefulOptimizer
) -> None:
    remedy = "resume with the settings of that run, or start a new run in another directory"
    own, theirs = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if own != theirs:
        raise ConfigError(
            f"{root} has an optimizer of {theirs} parameters per group, this run one of {own}; "
            f"{remedy}"
        )
    path = root / _PARAMETERS_FILE
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        kind, shapes = described["kind"], described["shapes"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _truncated_file_error(path, error) from error
    mine = _described(optimizer)
    if kind != mine["kind"]:
        raise ConfigError(f"{root} has an optimizer {kind}, this run {mine['kind']}; {remedy}")
    for index, (shape, wanted) in enumerate(zip(shapes, mine["shapes"], strict=True)):
        if shape != wanted:
            raise ConfigError(
                f"{root} has the shape {shape} for parameter {index} of its optimizer, this run "
                f"{wanted}; {remedy}"
            )


def _described(optimizer: Any) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind = getattr(optimizer, "kind", type(optimizer).__name__)
    return {"kind": kind, "shapes": [[*each.shape] for each in parameters]}


def _read_tensors(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True)
    except _TRUNCATED_FILE_ERRORS as error:
        raise _truncated_file_error(path, error) from error


def _truncated_file_error(path: Path, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {error}"
    return ConfigError(f"{path} is missing or was cut short ({reason}); use an earlier checkpoint")


class WeightsVersionCounter:
    """Reserves increasing weights versions and keeps the highest in a file.

    A run resumed from an older checkpoint must not reuse a version number. Rollouts of the
    discarded steps may still carry that number.
    `path`: file with the highest version. The file need not exist.
    `floor`: highest version known from elsewhere, such as a checkpoint.
    Raises ConfigError if the file does not hold a number.
    """

    def __init__(self, path: Path | str, floor: int = 0) -> None:
        self._path = Path(path)
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else "0"
        if not text.strip().isdecimal():
            raise ConfigError(
                f"{path} holds {text!r}, not the highest weights version of the run; write that "
                "number there, or one that is surely higher"
            )
        recorded = int(text)
        self._highest = max(recorded, floor)

    @property
    def highest(self) -> int:
        """The highest version reserved so far, or `floor` if that is higher."""
        return self._highest

    def reserve(self) -> int:
        """Write the next version to the file and return it."""
        self._highest += 1
        replace_text(self._path, f"{self._highest}\n")
        return self._highest


def _checkpoints(root: Path) -> list[Path]:
    """Return the directories of the complete checkpoints under `root`, sorted by step."""
    found = [path for path in root.glob("step_*") if _DIRECTORY_NAME.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _random_states() -> dict[str, Any]:
    # Tensors, numbers and tuples, which torch.load reads with `weights_only`.
    algorithm, keys, *rest = np.random.get_state()
    devices = torch.get_device_module()  # torch.cpu where there is no accelerator
    # An unused accelerator has drawn nothing. Reading its state would initialize it.
    has_states = hasattr(devices, "get_rng_state_all") and devices.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "accelerators": devices.get_rng_state_all() if has_states else [],
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def _restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    devices = torch.get_device_module()
    if hasattr(devices, "set_rng_state"):
        for device, state in enumerate(states["accelerators"][: devices.device_count()]):
            devices.set_rng_state(state, device)
    random.setstate(states["python"])
    algorithm, keys, *rest = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
