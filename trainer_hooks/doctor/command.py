"""python -m trainer_hooks.doctor: examine a saved batch, or the last one of a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from rollout.errors import ConfigError
from trainer_hooks.checkpoint import read_trainer_state
from trainer_hooks.doctor.diagnosis import Diagnosis, diagnose
from trainer_hooks.doctor.files import BATCHES, load_rollouts, step_of
from trainer_hooks.doctor.report import report
from trainer_hooks.doctor.tokens import seen_from
from trainer_hooks.pretrained import load_pretrained

EXIT_CODES = {"sound": 0, "fault": 1, "inconclusive": 3}
_USAGE_ERROR = 2  # argparse's own


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A batch of a run. `model`: the checkpoint that sampled it, None if that is gone;
    `older`: those before, by version.
    """

    batch: Path
    model: Path | None
    older: Mapping[int, Path]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the diagnosis; 0: sound, 1: a finding, 2: bad usage, 3: inconclusive."""
    given = _parser().parse_args(arguments)
    console, errors = Console(), Console(stderr=True)
    try:
        diagnosis = examine_files(given)
    except ConfigError as error:
        errors.print(f"error: {error}", style="red", highlight=False, markup=False)
        return _USAGE_ERROR
    console.print(report(diagnosis))
    if given.json is not None:
        given.json.write_text(json.dumps(diagnosis.as_json(), indent=2) + "\n", encoding="utf-8")
    return EXIT_CODES[diagnosis.verdict]


def examine_files(given: argparse.Namespace) -> Diagnosis:
    """Diagnose what the command line names. Raises ConfigError for files that do not fit."""
    older = dict(_version_and_path(pair) for pair in given.older)
    path, model_path = given.path, given.model
    if path.is_dir():
        found = files_of_run(path)
        path, model_path, older = found.batch, model_path or found.model, {**found.older, **older}
    saved = load_rollouts(path)
    version = saved.weights_version
    if model_path is None:
        raise ConfigError(
            f"{path} needs the weights of version {version}, which are not at hand; name their "
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
    """The newest batch of a run whose checkpoint is there, otherwise the newest.

    Raises ConfigError without a batch.
    """
    batches = {step_of(path): path for path in (directory / BATCHES).glob("step_*.pt")}
    if not batches:
        raise ConfigError(
            f"{directory} has no {BATCHES}/step_*.pt; run the job with logger.save_batches=true, "
            "or name a file of save_rollouts"
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_hooks.doctor",
        description="Say why the log-probs of trainer and engine differ.",
        epilog="Exit status: 0 sound, 1 a finding, 2 bad usage, 3 inconclusive.",
    )
    add = parser.add_argument
    add("path", type=Path, help="a file of save_rollouts, or the directory of a run")
    add("--model", type=Path, metavar="DIR", help="the weights of the batch's version")
    add("--older", action="append", default=[], metavar="VERSION=DIR", help="older weights")
    add("--temperature", type=float, help="the trainer's; otherwise the file's")
    add("--logprobs-mode", choices=("temperature", "processed"), default="temperature")
    add("--engine-dtype", choices=("float32", "bfloat16", "float16"), help="otherwise the model's")
    add("--end-ids", type=int, nargs="*", default=(), help="nothing may be generated behind them")
    add("--max-tokens", type=int, default=2048, help="tokens to examine, of rows evenly spread")
    add("--json", type=Path, metavar="FILE", help="write the diagnosis there, all tokens included")
    return parser
