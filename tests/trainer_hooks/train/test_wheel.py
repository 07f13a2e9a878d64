"""The built wheel: which files it installs, and that its kernels and `rollout train` run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("setuptools")

from rollout.backends.cpu.library import TARGETS, Target, cpu_flags, load_library
from tests.installed import needs
from tests.trainer_hooks.train.grpo_settings import TINY

pytestmark = [
    *(pytest.mark.slow, pytest.mark.timeout(900), needs("reasoning_gym")),
    pytest.mark.skipif(load_library() is None, reason="no C compiler"),
    pytest.mark.skipif("sse4_2" not in cpu_flags(), reason="a wheel is for x86-64 Linux"),
]
ROOT = Path(__file__).parents[3]
PACKAGED = ("rollout", "rollout_verl", "trainer_hooks")
KERNELS = "rollout/backends/cpu/native"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` builds."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.build_wheel", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    (built,) = folder.iterdir()
    assert done.stdout.startswith(f"{built}  ")
    return built


def test_the_wheel_installs_conf_inside_trainer_hooks_and_no_examples(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(PACKAGED)
    installed = {name for name in names if name.endswith(".yaml")}
    assert installed == {
        f"trainer_hooks/train/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")
    }


def test_the_wheel_has_the_kernels_of_each_target_for_any_python_3(wheel: Path) -> None:
    assert "-py3-none-manylinux_2_" in wheel.name
    assert wheel.name.endswith("_x86_64.whl")
    archive = zipfile.ZipFile(wheel)
    libraries = [Path(name) for name in archive.namelist() if name.endswith(".so")]
    assert {str(path.parent) for path in libraries} == {KERNELS}
    assert {path.name.rpartition("-")[0] for path in libraries} == {t.name for t in TARGETS}
    for path in libraries:
        assert b"libgomp" not in archive.read(str(path)), "torch's own OpenMP serves them"


def digest_of(options: str, folder: Path, **environment: str) -> tuple[str, str]:
    """Return what the program tests.backends.same_bits prints, and its log."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.same_bits", options, "128", "--fastest"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_wheels_kernels_give_the_bits_of_those_compiled_for_the_same_target(
    wheel: Path, target: Target, tmp_path: Path
) -> None:
    if not target.cpu_flags <= cpu_flags():
        pytest.skip("this processor cannot run it")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for better in TARGETS[: TARGETS.index(target)]:
        (library,) = (site / KERNELS).glob(f"{better.name}-{'?' * 32}.so")
        library.unlink()
    found = {"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/nowhere", "CC": ""}
    of_wheel, log = digest_of("wheel", tmp_path, **found)
    assert f"(from the wheel, for {target.name})" in log
    compiled, log = digest_of(",".join(target.options), tmp_path, PYTHONPATH=str(ROOT))
    assert "this installation has no compiled kernels" in log
    assert of_wheel == compiled


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
        env={"PATH": "/nowhere", "OMP_NUM_THREADS": "1"},  # no compiler
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "native kernels: off" not in done.stderr
    summary = json.loads((tmp_path / "outputs/train/demo/seed_0/summary.json").read_text())
    assert summary["num_steps"] == 3
