"""The job under torchrun: FSDP2 trains on two ranks and pushes each step to engine processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.installed import needs
from tests.trainer_hooks.train.grpo_settings import NUM_KINDS, TINY
from trainer_hooks import find_checkpoint, read_trainer_state
from trainer_hooks.metrics import read_jsonl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600), needs("reasoning_gym")]
DEMO = ("-m", "trainer_hooks.train", "--config-name", "demo")
ROOT = Path(__file__).parents[3]
TRANSPORTS = ("shared", "directory:{}", "collective", "delta+directory:{}", "delta+collective")


def begun(program: Sequence[str], folder: Path, *settings: str) -> subprocess.Popen[str]:
    """Start two ranks on this machine, at a port that torchrun chooses."""
    ranks = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    words = [f"{name}={value}" for name, value in TINY.items()]
    return subprocess.Popen(
        [*ranks, *program, *words, f"hydra.run.dir={folder / 'run'}", *settings],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CHECKSUMS": str(folder / "checksums")}
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(program: Sequence[str], folder: Path, *settings: str) -> tuple[int, str]:
    """Return the exit code of a job and its output."""
    process = begun(program, folder, *settings)
    errors = process.communicate()[1]
    return process.returncode, errors


def trained_steps(folder: Path) -> list[int]:
    path = folder / "run" / "seed_0" / "metrics.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return [row["trainer/step"] for row in rows if row.get("train/num_tokens")]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_processes_serve_the_full_fsdp2_state_dict_after_each_step(
    transport: str, tmp_path: Path
) -> None:
    code, errors = torchrun(
        ["tests/trainer_hooks/train/sharded_job.py"],
        tmp_path,
        *("trainer.strategy=fsdp2", "mode=async", "num_engines=2", "warmup=none"),
        f"reward={NUM_KINDS}",
        f"weight_transport={transport.format(tmp_path / 'weights')}",
    )
    assert code == 0, errors
    assert trained_steps(tmp_path) == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "checksums").read_text().splitlines()]
    assert len(rows) == 5, "the policy at the start, and each step"
    assert len({served for _, served, _ in rows}) == 5, "each step changes weights"
    assert [served for _, served, _ in rows] == [whole for _, _, whole in rows]


@pytest.mark.slow
def test_interrupted_fsdp2_run_of_two_ranks_saves_and_resumes(tmp_path: Path) -> None:
    job = DEMO, tmp_path
    words = (
        "trainer.strategy=fsdp2",
        "warmup=none",
        f"reward={NUM_KINDS}",
    )
    process = begun(*job, *words, "trainer.num_steps=1000", "trainer.checkpoint_interval=1000")
    while process.poll() is None and not trained_steps(tmp_path):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # to torchrun, which passes it on to all ranks
    errors = process.communicate()[1]
    checkpoint = find_checkpoint(tmp_path / "run" / "seed_0" / "checkpoints")
    assert checkpoint is not None, errors
    last = read_trainer_state(checkpoint).step
    assert trained_steps(tmp_path) == [*range(1, last + 1)], "it was saved at a step's edge"
    code, errors = torchrun(*job, *words, f"trainer.num_steps={last + 2}", "resume=auto")
    assert code == 0, errors
    assert trained_steps(tmp_path) == [*range(1, last + 3)]


@pytest.mark.slow
def test_torchrun_ranks_without_fsdp2_or_torchrun_launcher_are_refused(tmp_path: Path) -> None:
    code, errors = torchrun(DEMO, tmp_path)
    assert code != 0
    assert (
        "torchrun started 2 ranks, and each would be a separate trainer; choose trainer=" in errors
    )
    assert not (tmp_path / "run" / "seed_0").exists()
