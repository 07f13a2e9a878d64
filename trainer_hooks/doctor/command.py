"""The program `python -m trainer_hooks.doctor`, and the files of batches that it reads.

Used by `trainer_hooks.doctor` and its `__main__`. The program examines a saved batch, or the newest
batch of a run. `trainer_hooks.train.main` writes files of batches through BatchFiles.
`trainer_hooks.update.guarded_step` and users write them by `save_rollouts`.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from rollout.errors import ConfigError
from rollout.extras import extra_needed
from rollout.requests import DynamicInferenceRequest
from rollout.set_aside import set_aside
from trainer_hooks.checkpoint import NUM_KEPT, read_trainer_state
from trainer_hooks.collate import RolloutBatch
from trainer_hooks.doctor.diagnosis import Diagnosis, diagnose
from trainer_hooks.doctor.report import report
from trainer_hooks.doctor.tokens import seen_from, turns_of_rows
from trainer_hooks.files import replace_file
from trainer_hooks.pretrained import load_pretrained
from trainer_hooks.producer import TrainingBatch
from trainer_hooks.rollouts import Rollout

EXIT_CODES = {"sound": 0, "fault": 1, "inconclusive": 3}
_USAGE_ERROR = 2  # argparse's own


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run that a diagnosis needs.

    `model`: the checkpoint whose weights sampled `batch`, or None if it was deleted.
    `older`: earlier checkpoints by weights version.
    """

    batch: Path
    model: Path | None
    older: Mapping[int, Path]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the diagnosis and, with --json, write it to a file.

    Returns 0 if sound, 1 for a finding, 2 for unfit files, 3 if inconclusive. Exits with 2 for bad
    arguments.
    """
    given = _parser().parse_args(arguments)
    with extra_needed("train", "the doctor"):
        from rich.console import Console
    console, errors = Console(), Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    try:
        diagnosis = examine_files(given)
    except ConfigError as error:
        errors.print(f"error: {error}", style="red")
        return _USAGE_ERROR
    console.print(report(diagnosis))
    if given.json is not None:
        if (earlier := set_aside(given.json)) is not None:
            errors.print(f"moved the earlier {given.json} to {earlier}")
        given.json.write_text(json.dumps(diagnosis.as_json(), indent=2) + "\n", encoding="utf-8")
    return EXIT_CODES[diagnosis.verdict]


def examine_files(given: argparse.Namespace) -> Diagnosis:
    """Return the diagnosis of the files in the arguments. Raises ConfigError for unfit files."""
    older = dict(_version_and_path(pair) for pair in given.older)
    path, model_path = given.path, given.model
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; give a run's directory, outputs/train/RUN_NAME/seed_0, or a "
            "file that save_rollouts wrote"
        )
    if path.is_dir():
        found = files_of_run(path)
        path, model_path, older = found.batch, model_path or found.model, {**found.older, **older}
    saved = load_rollouts(path)
    version = saved.weights_version
    if model_path is None:
        raise ConfigError(
            f"{path} needs the weights of version {version}, which were not found; name their "
            "directory: --model DIR"
        )
    return diagnose(
        seen_from(saved.batch, version),
        _load("--model", model_path),
        saved.sources,
        older_models={v: _load("--older", own) for v, own in older.items() if v != version},
        temperature=saved.temperature if given.temperature is None else given.temperature,
        logprobs_mode=given.logprobs_mode,
        engine_dtype=given.engine_dtype and getattr(torch, given.engine_dtype),
        end_ids=given.end_ids,
        max_tokens=given.max_tokens,
    )


def files_of_run(directory: Path) -> RunFiles:
    """Return the files of a run's newest batch, if possible of one that still has its checkpoint.

    Raises ConfigError for a run without batches.
    """
    batches = {step_of(path): path for path in (directory / BATCHES).glob("step_*.pt")}
    if not batches:
        raise ConfigError(
            f"{directory} has no {BATCHES}/step_*.pt; run the job with logger.save_batches=true, "
            "or name a file that save_rollouts wrote"
        )
    checkpoints = {step_of(path): path for path in (directory / "checkpoints").glob("step_*")}
    step = max(batches.keys() & checkpoints.keys(), default=max(batches))
    older = [path for s, path in checkpoints.items() if s < step]
    return RunFiles(
        batch=batches[step],
        model=checkpoints.get(step),
        older={read_trainer_state(path).weights_version: path for path in older},
    )


def _load(setting: str, path: Path) -> nn.Module:
    with extra_needed("hf", setting):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()
    model: nn.Module = load_pretrained(AutoModelForCausalLM, setting, str(path))
    return model


def _version_and_path(pair: str) -> tuple[int, Path]:
    version, separator, path = pair.partition("=")
    if not separator or not version.isdecimal():
        raise ConfigError(f"--older {pair} must be VERSION=DIR, such as 3=checkpoints/step_000003")
    return int(version), Path(path)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_ERROR, f"error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m trainer_hooks.doctor",
        description="Explain why the log-probs of trainer and engine differ.",
        epilog="Exit status: 0 sound, 1 a finding, 2 bad usage, 3 inconclusive.",
    )
    add = parser.add_argument
    add("path", type=Path, help="a file of save_rollouts, or the directory of a run")
    add("--model", type=Path, metavar="DIR", help="weights of the batch's version")
    add(
        "--older",
        action="append",
        default=[],
        metavar="VERSION=DIR",
        help="weights of an older version",
    )
    add("--temperature", type=float, help="the trainer's temperature; default: the file's")
    add("--logprobs-mode", choices=("temperature", "processed"), default="temperature")
    add("--engine-dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's")
    add(
        "--end-ids",
        type=int,
        nargs="*",
        default=(),
        help="tokens after which nothing may be generated",
    )
    add("--max-tokens", type=int, default=2048, help="tokens to examine, in rows evenly spread")
    add("--json", type=Path, metavar="FILE", help="write the diagnosis to FILE, with all tokens")
    return parser


BATCHES = "batches"  # directory inside a run's directory
_FORMAT = "rollout-batch-1"
# Fields that no diagnosis reads. They make up most of a request.
_LEFT_OUT = ("events", "precomputed_block_hashes", "tpot", "routing_indices")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRollouts:
    """The contents of a file of `save_rollouts`.

    `sources`: one rollout for each row of `batch`, or None if they were not saved.
    `weights_version`: version of the weights with which to examine the batch.
    `temperature`: divisor of the trainer's logits.
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
    """Write the batch, its rollouts `sources` and the trainer's temperature to `path`.

    The file is written whole or not at all. Creates its directory.
    `weights_version`: version of the weights with which to examine the batch later. None means the
    batch's `train_version`.
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
    """Return the contents of a file of `save_rollouts`. Raises ConfigError for any other file."""
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
        raise ConfigError(f"{path} was not written by save_rollouts: {error!r}") from error


class BatchFiles:
    """Saves one batch for each checkpoint of a run, for later diagnosis.

    The saved batch is the first after the checkpoint in which the checkpoint's weights sampled at
    least half of the trained tokens. A checkpoint gets no file if there is no such batch before the
    next checkpoint. A file is named after the checkpoint's step, in the run's directory `batches`.
    The newest NUM_KEPT files are kept.
    `checkpoint_interval`: number of training steps between two checkpoints.
    """

    def __init__(self, directory: Path, temperature: float, checkpoint_interval: int) -> None:
        self._directory, self._temperature = directory / BATCHES, temperature
        self._interval = checkpoint_interval
        self._wanted: tuple[int, int] | None = None  # a checkpoint's step and version

    def log(self, step: int, batch: TrainingBatch) -> None:
        """Save the batch of training step `step`, from 1, if the last checkpoint needs a batch."""
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
    """Return the training step in a name such as step_000007.pt or step_000007."""
    return int(path.stem.removeprefix("step_"))


def _encoded(sources: Sequence[DynamicInferenceRequest | Rollout]) -> list[list[dict[str, Any]]]:
    rows = [[turn.serialize() for turn in turns] for turns in turns_of_rows(sources)]
    return [[{k: v for k, v in t.items() if k not in _LEFT_OUT} for t in turns] for turns in rows]


def _decoded(turns: Sequence[dict[str, Any]]) -> Rollout:
    requests = [DynamicInferenceRequest.deserialize(turn) for turn in turns]
    return Rollout(requests, failure=None if requests else "no turn")
