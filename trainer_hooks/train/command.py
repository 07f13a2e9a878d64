"""The program `rollout train`: checks its command line, then imports and runs the job.

`rollout.cli` runs it by the entry point `train`, and `python -m trainer_hooks.train` calls `main`.
torch is imported only if the command line has no mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rollout.errors import ConfigError
from trainer_hooks import train
from trainer_hooks.train.hydra_job import run_hydra_job
from trainer_hooks.train.job import CONFIG_DIRECTORY, JobSettings

USAGE = 2  # exit code for a mistake on the command line, as in `rollout`


def main() -> None:
    """Run the job of sys.argv. A mistake on the command line is printed and ends the process."""
    try:
        run(sys.argv[1:])
    except ConfigError as error:
        print(f"rollout: error: {error}", file=sys.stderr)
        sys.exit(USAGE)


def run(words: Sequence[str]) -> int:
    """Run `rollout train WORDS` and return 0. Sets sys.argv. Raises ConfigError for a mistake on
    the command line, and SystemExit if the job fails."""
    sys.argv = ["rollout train", *words]
    run_hydra_job(
        lambda settings: train.run_job(settings),  # imports the job, and torch
        JobSettings,
        config_path=str(CONFIG_DIRECTORY),
        config_name="train",
    )
    return 0
