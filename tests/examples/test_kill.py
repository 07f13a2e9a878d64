"""The job as a process of its own: killed without warning, then resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.examples.grpo_settings import TINY
from trainer_hooks.metrics import read_jsonl

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0


def start_job(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    overrides = [f"{name}={value}" for name, value in TINY.items()]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "train_grpo.py"), *overrides, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def steps_and_versions(run: Path) -> list[tuple[int, int]]:
    path = run / "metrics.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return [(row["trainer/step"], row["rollout/version"]) for row in rows if "reward" in row]


@pytest.mark.slow
def test_a_killed_job_resumes_where_its_checkpoint_stands(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "train_grpo" / "demo" / "seed_0"
    # A step after the checkpoint of step 20 must be lost, so that the resumed job repeats it.
    settings = ("trainer.num_steps=400", "trainer.checkpoint_interval=20")
    job = start_job(tmp_path, *settings)
    deadline = time.monotonic() + TIMEOUT_S
    while len(steps_and_versions(run)) < 25:
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline, "the job made no steps"
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    killed = steps_and_versions(run)

    num_steps = killed[-1][0] + 10
    job = start_job(tmp_path, f"trainer.num_steps={num_steps}", "resume=auto")
    assert job.communicate(timeout=TIMEOUT_S)[1] == ""
    assert job.returncode == 0
    resumed = steps_and_versions(run)
    assert [step for step, _ in resumed] == list(range(1, num_steps + 1))
    repeated = [version for step, version in resumed if (step, version) not in killed]
    assert min(repeated) > max(version for _, version in killed)
    assert (run / "summary.json").exists()
