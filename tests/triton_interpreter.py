"""Triton's interpreter on machines without a GPU, mended where NumPy 2.4 breaks it."""

from __future__ import annotations

import importlib.util
import os
from typing import Any


def interpret_triton() -> None:
    """Have kernels interpreted on CPU tensors; call it before any of them is imported.

    Triton 3.6 takes loop bounds from arrays of one element by int(), which NumPy 2.4 refuses.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
