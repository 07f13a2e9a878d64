"""The launcher that a training job's config names, and invalid ones, which are refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.launch.local import LocalLauncher
from rollout.launch.ray import RayLauncher
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
