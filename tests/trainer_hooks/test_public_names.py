"""Names of trainer_hooks, and the deprecated ones of the version before."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import trainer_hooks


def test_all_lists_what_trainer_hooks_has_and_no_deprecated_name() -> None:
    names = trainer_hooks.__all__
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(trainer_hooks, name)] == []
    assert not set(names) & set(trainer_hooks._RENAMED)


@pytest.mark.parametrize("name", trainer_hooks._RENAMED)
def test_a_deprecated_name_is_the_new_object_and_warns(name: str) -> None:
    module, new_name = trainer_hooks._RENAMED[name]
    with pytest.warns(DeprecationWarning, match=f"{name} is now {module}.{new_name}; the old name"):
        found = getattr(trainer_hooks, name)
    assert found is getattr(import_module(module), new_name)


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        trainer_hooks.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "name", ["losses.kl_estimate", "metrics.MetricsLogger", "rewards.runner.as_runner"]
)
def test_modules_of_the_names_are_attributes_after_import_trainer_hooks(name: str) -> None:
    script = f"import trainer_hooks; print(trainer_hooks.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (name.rpartition(".")[2], "")
