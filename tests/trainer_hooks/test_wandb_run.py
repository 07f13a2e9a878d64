"""The real wandb package, offline."""

from pathlib import Path

import pytest

from trainer_hooks import MetricsLogger
from trainer_hooks.metrics import start_wandb_run


def test_an_offline_run_is_written_below_the_given_directory(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = start_wandb_run(
        project="test", name="offline", directory=tmp_path / "run", config={"seed": 0}
    )
    with MetricsLogger(jsonl=tmp_path / "m.jsonl", wandb=run) as logger:
        logger.log({"reward": 0.5}, step=1, version=2)
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb"))
