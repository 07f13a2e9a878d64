"""The asynchronous job in its own processes, killed without warning and resumed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.installed import needs
from tests.run_seed import run_seed
from tests.tiny_models import IS_LONG
from tests.trainer_hooks.train.paced_job import PacedJob
from trainer_hooks import PromptLedger
from trainer_hooks.metrics import read_jsonl
from trainer_hooks.train.palindromes import NUM_PROMPTS

pytestmark = needs("reasoning_gym")

# One kill of an engine and the trainer at once; those of engines alone are tests/apis's, too.
NUM_KILLS, NUM_ENGINES = (10, 2) if IS_LONG else (1, 1)
STEPS_PER_LIFE = 3


def start_job(directory: Path, num_steps: int, *arguments: str) -> PacedJob:
    settings = (
        f"num_engines={NUM_ENGINES}",
        "weight_sync=in_flight",
        "producer.max_staleness_versions=1",
    )
    return PacedJob(directory, *settings, f"trainer.num_steps={num_steps}", *arguments)


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / f"{name}.jsonl"
    return read_jsonl(path) if path.exists() else []


def last_step(run: Path) -> int:
    return max((row["trainer/step"] for row in rows_of(run, "batches")), default=0)


def engine_pids(trainer: int) -> list[int]:
    """Return the trainer's child processes that run an engine."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            command = status.with_name("cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(fields["PPid"]) == trainer and b"rollout.apis.engine_process" in command:
            found.append(int(status.parent.name))
    return found


@pytest.mark.timeout(600)
def test_killed_async_job_resumes_and_trains_every_prompt_once(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "train" / "demo" / "seed_0"
    rng, num_steps = random.Random(run_seed()), (NUM_KILLS + 1) * STEPS_PER_LIFE
    kinds = [("both", "engine", "trainer")[i % 3] for i in range(NUM_KILLS)]
    victims = Counter[str]()
    job = start_job(tmp_path, num_steps)
    for number, kind in enumerate(kinds, start=1):
        # It may be anywhere before the step that it waits for.
        job.allow(number * STEPS_PER_LIFE)
        wanted = number * STEPS_PER_LIFE - rng.randint(0, STEPS_PER_LIFE - 2)
        job.wait_until(lambda wanted=wanted: last_step(run) >= wanted)
        time.sleep(rng.uniform(0.0, 0.3))
        if kind in ("engine", "both"):
            os.kill(rng.choice(engine_pids(job.pid)), signal.SIGKILL)
            victims["engine"] += 1
        if kind in ("trainer", "both"):
            job.kill()
            victims["trainer"] += 1
            job = start_job(tmp_path, num_steps, "resume=auto")
    job.finish()
    steps = [row["trainer/step"] for row in rows_of(run, "metrics") if "reward" in row]
    assert steps == list(range(1, num_steps + 1))
    prompts = [tuple(p) for row in rows_of(run, "batches") for p in row["prompts"]]
    assert len(prompts) == 4 * num_steps
    assert len(set(prompts)) == len(prompts), "a prompt was trained twice"
    ledger = PromptLedger([[1]] * NUM_PROMPTS, seed=0)  # it issues in the order of the job's
    issued = [ledger.issue() for _ in prompts]
    first = {(ticket.epoch, ticket.index) for ticket in issued if ticket is not None}
    assert set(prompts) == first, "one was never trained"
    rewards = [row["reward"] for row in rows_of(run, "metrics") if "reward" in row]
    assert all(reward is not None for reward in rewards)
    print(f"\n{dict(victims)} killed, {len(prompts)} prompts once each over {num_steps} steps")
