"""Every config group maps onto its dataclass, and jobs compose from any directory."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

import conf
from examples.grpo.settings import JobSettings
from rollout.config import KVCacheManagementMode
from trainer_hooks.config_loading import init_field_types, load_dataclass

CONF = Path(conf.__file__).parent
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name != "hydra"
)


def composed(*overrides: str) -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_module(config_module="conf", version_base="1.3"):
        return compose(config_name="train_grpo", overrides=list(overrides))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_of_every_group_maps_onto_its_dataclass(group: str, option: str) -> None:
    settings = load_dataclass(JobSettings, composed(f"{group}={option}"))
    kind = init_field_types(JobSettings)[group]
    assert isinstance(getattr(settings, group), kind)


def test_every_dataclass_of_the_job_has_a_group() -> None:
    groups = {group for group, _ in OPTIONS}
    assert groups == {
        field.name
        for field in fields(JobSettings)
        if hasattr(init_field_types(JobSettings)[field.name], "__dataclass_fields__")
    }


def test_the_engine_group_makes_an_inference_config() -> None:
    settings = load_dataclass(JobSettings, composed("engine.kv_cache_management_mode=recompute"))
    assert settings.engine.kv_cache_management_mode is KVCacheManagementMode.RECOMPUTE


JOB = """
from examples.grpo.settings import JobSettings
from trainer_hooks.hydra_job import run_hydra_job

def report(settings):
    print("group_size", settings.algorithm.group_size)

run_hydra_job(report, JobSettings, config_path="pkg://conf", config_name="train_grpo")
"""


def run_job(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a job with the example's config in `directory`, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", JOB, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_multirun_composes_every_combination_in_any_directory(tmp_path: Path) -> None:
    job = run_job(tmp_path, "--multirun", "algorithm.group_size=4,6", "run_name=sweep")
    assert job.returncode == 0, job.stderr
    assert re.findall(r"group_size (\d)", job.stdout) == ["4", "6"]
    sweep = tmp_path / "outputs" / "train_grpo" / "sweep-multirun"
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1"]


def test_an_unknown_key_ends_a_job_with_the_nearest_one(tmp_path: Path) -> None:
    job = run_job(tmp_path, "engine.block_size=16")
    assert job.returncode == 1
    assert job.stderr.strip() == (
        "error: unknown config key engine.block_size; did you mean engine.block_size_tokens?"
    )
    assert list(tmp_path.iterdir()) == []
