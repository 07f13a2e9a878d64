"""The asynchronous job as processes of its own: killed without warning, then resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.examples.grpo_settings import TINY
from tests.tiny_models import IS_LONG
from trainer_hooks.metrics import read_jsonl

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
NUM_KILLS = 10 if IS_LONG else 2
STEPS_PER_LIFE = 5  # in fewer a job may be at its end before it is killed


def start_job(directory: Path, num_steps: int, *arguments: str) -> subprocess.Popen[str]:
    changes = {
        "mode": "async",
        "num_engines": 2,
        "producer.max_staleness_versions": 1,
        "trainer.num_steps": num_steps,
        "logger.console": "false",
    }
    overrides = [f"{name}={value}" for name, value in {**TINY, **changes}.items()]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "train_grpo.py"), *overrides, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def rows_of(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / f"{name}.jsonl"
    return read_jsonl(path) if path.exists() else []


def last_step(run: Path) -> int:
    return max((row["trainer/step"] for row in rows_of(run, "batches")), default=0)


def engine_pids(trainer: int) -> list[int]:
    """Children of the trainer that run an engine, by what multiprocessing calls them."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            command = status.with_name("cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(fields["PPid"]) == trainer and b"spawn_main" in command:
            found.append(int(status.parent.name))
    return sorted(found)[1:]  # the first one is the coordinator


@pytest.mark.timeout(600)
def test_a_killed_job_trains_every_prompt_once_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "train_grpo" / "demo" / "seed_0"
    rng, num_steps = random.Random(7), (NUM_KILLS + 1) * STEPS_PER_LIFE
    kinds = [("both", "engine", "trainer")[i % 3] for i in range(NUM_KILLS)]
    victims = Counter[str]()
    job = start_job(tmp_path, num_steps)
    for number, kind in enumerate(kinds):
        wait_for_step(job, run, number * STEPS_PER_LIFE + rng.randint(2, STEPS_PER_LIFE))
        time.sleep(rng.uniform(0.0, 0.3))
        if kind in ("engine", "both"):
            os.kill(rng.choice(engine_pids(job.pid)), signal.SIGKILL)
            victims["engine"] += 1
        if kind in ("trainer", "both"):
            os.kill(job.pid, signal.SIGKILL)
            job.communicate()
            victims["trainer"] += 1
            job = start_job(tmp_path, num_steps, "resume=auto")
    _, errors = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, errors
    steps = [row["trainer/step"] for row in rows_of(run, "metrics") if "reward" in row]
    assert steps == list(range(1, num_steps + 1))
    prompts = [tuple(p) for row in rows_of(run, "batches") for p in row["prompts"]]
    assert len(prompts) == 4 * num_steps
    assert len(set(prompts)) == len(prompts), "a prompt was trained twice"
    assert {index for _, index in prompts} == set(range(4 * num_steps)), "one was never trained"
    rewards = [row["reward"] for row in rows_of(run, "metrics") if "reward" in row]
    assert all(reward is not None for reward in rewards)
    print(f"\n{dict(victims)} killed, {len(prompts)} prompts once each over {num_steps} steps")


def wait_for_step(job: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while last_step(run) < step:
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline, f"no step {step}, the last is {last_step(run)}"
        time.sleep(0.02)
