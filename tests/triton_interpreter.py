"""Triton's interpreter on machines without a GPU: mended where NumPy 2.4 breaks it, hastened.

It counts launches, so that a test that launches kernels is known.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from functools import cache
from typing import Any


class Launches:
    """Count of the kernels that this process has launched in the interpreter."""

    def __init__(self) -> None:
        self.count = 0


def interpret_triton() -> Launches:
    """Have kernels interpreted on CPU tensors; call it before any of them is imported."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    launches = Launches()
    if importlib.util.find_spec("triton") is not None:
        _index_by_tensors()
        _look_for_builtins_once()
        _count_launches(launches)
    return launches


def _count_launches(launches: Launches) -> None:
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        launches.count += 1
        return launch(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = counted


def _index_by_tensors() -> None:
    """Triton 3.6 takes loop bounds from arrays of one element by int(), which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def _look_for_builtins_once() -> None:
    """Triton looks through its whole language for what to replace each time a kernel calls a
    function: two fifths of the interpreter's time. Which they are never changes.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def names_of_builtins(place: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtins(place: Any, builder: Any, scope: Any) -> None:
        for name in names_of_builtins(place):
            member = getattr(place, name)
            if not is_builtin(member):
                return  # an outer call has replaced them all
            interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins
