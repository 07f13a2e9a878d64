"""PPO with a critic, asynchronous, on the task of examples/train_grpo.py.

    python examples/train_ppo.py
    python examples/train_ppo.py seeds=3
    python examples/train_ppo.py resume=auto
    python examples/train_ppo.py producer.max_staleness_versions=0     # generate, train, by turns

Engine processes generate while this one trains; no token is older than the producer's bound.
Results are in outputs/train_ppo/<run_name>/seed_<seed>.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from examples.grpo.async_loop import run_async
from examples.grpo.summary import RunSummary, summarise, summary_table
from examples.ppo.learner import make_ppo_learner
from examples.ppo.settings import PpoJobSettings
from trainer_hooks.hydra_job import run_hydra_job
from trainer_hooks.metrics import read_jsonl, write_reward_curve

INTERRUPTED_EXIT_CODE = 130


def run_job(settings: PpoJobSettings) -> None:
    """All runs of the job, one after another, and a table of what they showed."""
    disable_progress_bar()
    console = Console(quiet=not settings.logger.console)
    directory = Path(HydraConfig.get().runtime.output_dir)
    summaries = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        try:
            summaries.append(run_seed(directory / f"seed_{seed}", settings, seed))
        except KeyboardInterrupt:
            console.print("interrupted; the same command with resume=auto goes on from here")
            sys.exit(INTERRUPTED_EXIT_CODE)
        console.print(summary_table(summaries, "PPO"))


def run_seed(directory: Path, settings: PpoJobSettings, seed: int) -> RunSummary:
    """One run, and the files it leaves."""
    asyncio.run(run_async(directory, settings, seed, make_ppo_learner))
    rows = read_jsonl(directory / "metrics.jsonl")
    summary = summarise(rows, seed)
    rewards = [row["reward"] for row in rows if "reward" in row]
    title = f"PPO, palindrome_generation, seed {seed}"
    write_reward_curve(directory / "reward_curve.png", rewards, title=title)
    (directory / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return summary


if __name__ == "__main__":
    run_hydra_job(
        run_job,
        PpoJobSettings,
        config_path="pkg://conf",
        config_name="train_ppo",
        shows_config=lambda settings: settings.logger.console,
    )
