"""A batch and its requests in a file, which torch.load reads with weights_only."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollout.errors import ConfigError
from rollout.requests import DynamicInferenceRequest
from trainer_hooks.checkpoint import NUM_KEPT
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.doctor.tokens import turns_of_rows
from trainer_hooks.files import replace_file
from trainer_hooks.producer import TrainingBatch
from trainer_hooks.rollouts import Rollout

BATCHES = "batches"  # the directory of a run
_FORMAT = "rollout-batch-1"
# A diagnosis reads none of them, and they are most of a request.
_LEFT_OUT = ("events", "precomputed_block_hashes", "tpot", "routing_indices")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRollouts:
    """What `save_rollouts` wrote. `sources`: one per row; None if they were not given.

    `weights_version`: that of the weights which belong to the file.
    """

    batch: RolloutBatch
    weights_version: int
    sources: Sequence[Rollout] | None
    temperature: float


def save_rollouts(
    path: Path | str,
    batch: RolloutBatch,
    sources: Sequence[DynamicInferenceRequest | Rollout] | None = None,
    temperature: float = 1.0,
    weights_version: int | None = None,
) -> None:
    """Write the batch, what it was collated of and the trainer's temperature to `path`.

    `weights_version`: of the weights that will be at hand; None is the version it is trained at.
    The file is complete or absent. Its directory is made.
    """
    saved = {
        "format": _FORMAT,
        "batch": batch.as_dict(),
        "sources": None if sources is None else _encoded(sources),
        "temperature": temperature,
        "weights_version": batch.train_version if weights_version is None else weights_version,
    }
    replace_file(Path(path), partial(torch.save, saved))


def load_rollouts(path: Path | str) -> SavedRollouts:
    """Read what `save_rollouts` wrote. Raises ConfigError for any other file."""
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        if saved["format"] != _FORMAT:
            raise ConfigError(f"{path} has the format {saved['format']!r}, not {_FORMAT!r}")
        rows = saved["sources"]
        return SavedRollouts(
            batch=RolloutBatch(**saved["batch"]),
            sources=None if rows is None else [_decoded(turns) for turns in rows],
            temperature=saved["temperature"],
            weights_version=saved["weights_version"],
        )
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OSError, pickle.PickleError) as error:
        raise ConfigError(f"{path} is no file of save_rollouts: {error!r}") from error


class BatchFiles:
    """Keeps a batch for each checkpoint of a run: the first whose tokens its weights sampled.

    They are in the directory `batches`, under the step of the checkpoint; as many stay as
    `save_checkpoint` leaves checkpoints.
    """

    def __init__(self, directory: Path, temperature: float, checkpoint_interval: int) -> None:
        self._directory, self._temperature = directory / BATCHES, temperature
        self._interval = checkpoint_interval
        self._wanted: tuple[int, int] | None = None  # step and version of the checkpoint

    def log(self, step: int, batch: TrainingBatch) -> None:
        """The batch that was trained on in `step`."""
        if (step - 1) % self._interval == 0:
            self._wanted = step - 1, batch.version
        if self._wanted is None:
            return
        checkpoint, version = self._wanted
        rows = batch.rollouts
        lag_N = rows.policy_lag_BT[rows.mask_BT]
        if 2 * int((lag_N == batch.version - version).sum()) < len(lag_N):
            return
        self._wanted = None
        sources = [rollout for group in batch.groups for rollout in group.rollouts]
        target = self._directory / f"step_{checkpoint:06d}.pt"
        save_rollouts(target, rows, sources, self._temperature, weights_version=version)
        for outdated in sorted(self._directory.glob("step_*.pt"), key=step_of)[:-NUM_KEPT]:
            outdated.unlink()


def step_of(path: Path) -> int:
    """The training step in a name such as step_000007.pt."""
    return int(path.stem.removeprefix("step_"))


def _encoded(sources: Sequence[DynamicInferenceRequest | Rollout]) -> list[list[dict[str, Any]]]:
    """The turns of each row, without what is left out."""
    rows = [[turn.serialize() for turn in turns] for turns in turns_of_rows(sources)]
    return [[{k: v for k, v in t.items() if k not in _LEFT_OUT} for t in turns] for turns in rows]


def _decoded(turns: Sequence[dict[str, Any]]) -> Rollout:
    requests = [DynamicInferenceRequest.deserialize(turn) for turn in turns]
    return Rollout(requests, failure=None if requests else "no turn")
