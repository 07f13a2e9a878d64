"""GRPO from a random model to a verified skill, on a CPU, through the rollout engine.

    python examples/train_grpo.py                                   # seed 0
    python examples/train_grpo.py seeds=3                           # seeds 0, 1, 2, then a table
    python examples/train_grpo.py resume=auto                       # go on after a kill or Ctrl-C
    python examples/train_grpo.py run_name=shuffled algorithm.shuffle_rewards=true     # the control
    python examples/train_grpo.py mode=async run_name=async producer.max_staleness_versions=1
    python examples/train_grpo.py --multirun algorithm.group_size=4,8

It shows that GRPO climbs on the verifier of a third-party library, not that it beats more
supervision. Results are in outputs/train_grpo/<run_name>/seed_<seed>.
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
from examples.grpo.evaluate import greedy_reward
from examples.grpo.learner import make_grpo_learner
from examples.grpo.loop import train
from examples.grpo.reference import load_reference, save_reference
from examples.grpo.run import Run, open_run
from examples.grpo.settings import JobSettings
from examples.grpo.summary import RunSummary, summarise, summary_table
from examples.grpo.warmup import warm_up
from trainer_hooks import find_checkpoint
from trainer_hooks.hydra_job import run_hydra_job
from trainer_hooks.metrics import read_jsonl, write_reward_curve

INTERRUPTED_EXIT_CODE = 130


def run_job(settings: JobSettings) -> None:
    """All runs of the job, one after another, and a table of what they showed."""
    disable_progress_bar()
    console = Console(quiet=not settings.logger.console)
    directory = Path(HydraConfig.get().runtime.output_dir)
    summaries = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        run_directory = directory / f"seed_{seed}"
        console.print(f"[bold]seed {seed}[/bold] in {run_directory}", highlight=False)
        try:
            summaries.append(run_seed(run_directory, settings, seed))
        except KeyboardInterrupt:
            console.print("interrupted; the same command with resume=auto goes on from here")
            sys.exit(INTERRUPTED_EXIT_CODE)
        console.print(summary_table(summaries[-1:]))
        console.print(
            f"policy in {find_checkpoint(run_directory / 'checkpoints')}", highlight=False
        )
    if len(summaries) > 1:
        console.print(summary_table(summaries))


def run_seed(directory: Path, settings: JobSettings, seed: int) -> RunSummary:
    """One run: warm-up, GRPO, greedy evaluation before and after, and the files it leaves.

    Raises KeyboardInterrupt at a step edge after Ctrl-C; with a checkpoint, once GRPO has begun.
    """
    if settings.mode == "async":
        asyncio.run(run_async(directory, settings, seed, make_grpo_learner))
    else:
        run_sync(directory, settings, seed)
    rows = read_jsonl(directory / "metrics.jsonl")
    summary = summarise(rows, seed)
    rewards = [row["reward"] for row in rows if "reward" in row]
    write_reward_curve(
        directory / "reward_curve.png", rewards, title=f"GRPO, palindrome_generation, seed {seed}"
    )
    (directory / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    return summary


def run_sync(directory: Path, settings: JobSettings, seed: int) -> None:
    """Generate and train by turns, in this process."""
    with open_run(directory, settings, seed) as run:
        if not run.is_resumed:
            warm_up(run)
            save_reference(run.policy, directory, settings.algorithm.loss)
            log_greedy_reward(run, step=0)
            run.save(step=0)
        run.learner.reference = load_reference(directory, settings.algorithm.loss)
        train(run)
        log_greedy_reward(run, step=settings.trainer.num_steps)


def log_greedy_reward(run: Run, step: int) -> None:
    """Evaluate on the held-out problems and record the result."""
    reward = greedy_reward(run)
    run.logger.log({"eval/greedy_reward": reward}, step=step, version=run.llm.weights_version)


if __name__ == "__main__":
    run_hydra_job(
        run_job,
        JobSettings,
        config_path="pkg://conf",
        config_name="train_grpo",
        shows_config=lambda settings: settings.logger.console,
    )
