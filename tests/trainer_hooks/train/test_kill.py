"""The job in its own process, killed without warning and resumed."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.installed import needs
from tests.trainer_hooks.train.paced_job import PacedJob
from trainer_hooks.metrics import read_jsonl

pytestmark = needs("reasoning_gym")


def steps_and_versions(run: Path) -> list[tuple[int, int]]:
    path = run / "metrics.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return [(row["trainer/step"], row["rollout/version"]) for row in rows if "reward" in row]


@pytest.mark.slow
def test_killed_job_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "train" / "demo" / "seed_0"
    settings = ("trainer.num_steps=20", "trainer.checkpoint_interval=6")
    job = PacedJob(tmp_path, *settings)
    job.allow(8)  # two steps after the checkpoint are lost, so that the resumed job repeats them
    job.wait_until(lambda: len(steps_and_versions(run)) == 8)
    job.kill()
    killed = steps_and_versions(run)

    assert PacedJob(tmp_path, *settings, "resume=auto").finish() == ""
    resumed = steps_and_versions(run)
    assert [step for step, _ in resumed] == list(range(1, 21))
    assert resumed[:6] == killed[:6]
    assert min(version for _, version in resumed[6:]) > max(version for _, version in killed)
    assert (run / "summary.json").exists()
