"""The launcher that a training job's config names, invalid ones, and jobs without their engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.launch import ray
from rollout.launch.local import LocalLauncher
from rollout.launch.private_files import PrivateFolder
from rollout.launch.ray import EngineActor, RayLauncher
from rollout.launch.slurm import run_job
from trainer_hooks.train.config_loading import make_object
from trainer_hooks.train.settings import LOCAL_LAUNCHER


def test_a_launcher_is_made_with_its_options() -> None:
    assert isinstance(make_object(LOCAL_LAUNCHER, {}, "launcher"), LocalLauncher)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (LOCAL_LAUNCHER, {"num_cpu": 2}, r"launcher.options={'num_cpu': 2}: .*no arguments"),
        ("rollout.launch.local:Launchers", {}, "launcher.path=.* has no Launchers"),
        ("rollout.launch.lan:Launcher", {}, "there is no module rollout.launch.lan"),
    ],
)
def test_an_invalid_launcher_is_refused_by_name(path: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_object(path, options, "launcher")


def test_ray_launcher_without_ray_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"RayLauncher needs Ray: pip install 'ray>=2.40'"):
        RayLauncher()


@pytest.mark.parametrize("launcher", ["ray", "slurm"])
def test_arguments_that_cannot_be_loaded_are_an_error_of_the_engine(
    launcher: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored, address = b"not a pickle", "127.0.0.1:1"
    if launcher == "ray":
        monkeypatch.setattr(ray, "_imported_ray", lambda: SimpleNamespace(get=lambda given: given))
        fault = EngineActor("no_module", address, [stored]).run()
    else:
        given = PrivateFolder(tmp_path / "own").write("arguments", stored)
        fault = run_job("no_module", address, str(tmp_path / "own"), given, str(tmp_path / "mark"))
    assert fault is not None
    assert fault["type"] == "UnpicklingError"
    assert "the engine failed" in caplog.text
