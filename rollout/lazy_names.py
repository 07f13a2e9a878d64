"""lazy_names: imports the module of an exported name when the name is first used.

Used by the `__init__.py` of `rollout`, `rollout.apis`, `rollout.models`, `rollout.requests`,
`trainer_hooks` and packages in `trainer_hooks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` for `package`.

    `homes` maps a module to its names, separated by spaces. `__getattr__` imports the name's module
    and also sets the name in the package. It also finds the modules of `homes` that belong to the
    package, as if they were imported with it.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    inside = [home.removeprefix(f"{package}.") for home in homes if home.startswith(f"{package}.")]
    modules = {module.partition(".")[0] for module in inside}

    def load(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")  # which sets the name in the package
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # so that `__getattr__` is not called again
        return value

    return load, sorted(home_of)
