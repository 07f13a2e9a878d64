"""Stands for vLLM where its tests run: a command line that starts our server, a few names that the
tests read, and for all else names whose use skips a test.

A test that makes or calls an object of vLLM tests vLLM in its own process, not a server.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import pytest


class _AbsentType(type):
    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        _skip(cls)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _skip(cls)


class Absent(Exception, metaclass=_AbsentType):
    """A class or function of vLLM. It may be named, as in an annotation or `pytest.raises`."""

    def __class_getitem__(cls, item: object) -> type[Absent]:
        return cls


def _skip(absent: type) -> None:
    pytest.skip(f"in process: {absent.__module__}.{absent.__qualname__}", allow_module_level=True)


def absent_names(module: str, path: Sequence[str] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of `module`: its submodules in `path`, and absent names."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if path and PathFinder.find_spec(f"{module}.{name}", path) is not None:
            return importlib.import_module(f"{module}.{name}")
        return type(name, (Absent,), {"__module__": module, "__qualname__": name})

    return get


class _AbsentModules(MetaPathFinder, Loader):
    """Finds every module of vLLM that this folder does not have."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("vllm."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = absent_names(module.__name__)  # type: ignore[method-assign]


sys.meta_path.append(_AbsentModules())
__getattr__ = absent_names(__name__, __path__)
