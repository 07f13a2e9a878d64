"""The scripts of examples/multi_node train the demo's job, on this machine alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.installed import needs
from tests.launch.clusters import has_submitit
from tests.trainer_hooks.train.grpo_settings import TINY
from trainer_hooks.metrics import read_jsonl

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    needs("reasoning_gym"),
]
ROOT = Path(__file__).parents[2]


def steps_of(script: str, folder: Path, *settings: str, **environment: str) -> list[int]:
    """Run a script; the steps that it has trained, after step 0, which is evaluated."""
    words = [f"{name}={value}" for name, value in TINY.items()]
    words += [f"hydra.run.dir={folder / 'run'}", *settings]
    done = subprocess.run(
        ["sh", f"examples/multi_node/{script}", *words],
        cwd=ROOT,
        env=os.environ
        | {"PYTHON": sys.executable, "SHARED": str(folder), "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = read_jsonl(folder / "run" / "seed_0" / "metrics.jsonl")
    return sorted({row["trainer/step"] for row in rows if row["trainer/step"]})


def test_torchrun_with_a_trainer_and_two_engines(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert steps_of("torchrun.sh", tmp_path, RANKS="3", PORT=port) == [1, 2, 3, 4]


@pytest.mark.skipif(not has_submitit(), reason="submitit is not installed")
def test_slurms_script_with_engines_that_submitit_runs_here(tmp_path: Path) -> None:
    here = ("launcher.options.cluster=local", "launcher.options.host=127.0.0.1")
    assert steps_of("slurm.sh", tmp_path, *here, ENGINES="1") == [1, 2, 3, 4]
    assert not list((tmp_path / "slurm").glob("arguments-*")), "keys are not left behind"
