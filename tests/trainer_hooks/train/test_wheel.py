"""The built wheel: which files it installs, and that its `rollout train` runs the demo."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("setuptools")

from tests.installed import needs
from tests.trainer_hooks.train.grpo_settings import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs("reasoning_gym")]
ROOT = Path(__file__).parents[3]
PACKAGED = ("rollout", "rollout_verl", "trainer_hooks", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources."""
    directory = tmp_path_factory.mktemp("wheel")
    for name in PACKAGED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=directory, capture_output=True, text=True, check=True
    )
    assert "Warning" not in done.stderr, done.stderr
    return directory / done.stdout.splitlines()[-1]


def test_the_wheel_installs_conf_inside_trainer_hooks_and_no_examples(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(PACKAGED[:3])
    installed = {name for name in names if name.endswith(".yaml")}
    assert installed == {
        f"trainer_hooks/train/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")
    }


def test_rollout_train_of_the_wheel_runs_the_demo_for_three_steps(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch and the rest
    command = "import sys; from rollout.cli.main import main; sys.exit(main())"
    words = [f"{name}={value}" for name, value in (TINY | {"trainer.num_steps": 3}).items()]
    done = subprocess.run(
        [environment / "bin" / "python", "-c", command, "train", "--config-name", "demo", *words],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "outputs/train/demo/seed_0/summary.json").read_text())
    assert summary["num_steps"] == 3
