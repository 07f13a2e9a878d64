"""The families this package can build. A new one is a file beside `llama.py` and a line here."""

from __future__ import annotations

from types import MappingProxyType

from rollout.errors import ModelError
from rollout.models.family import Family
from rollout.models.llama import LLAMA
from rollout.models.qwen2 import QWEN2
from rollout.models.qwen3 import QWEN3

FAMILIES = MappingProxyType({family.name: family for family in (LLAMA, QWEN2, QWEN3)})


def find_family(model_type: object) -> Family:
    """The family of a config's `model_type`. Raises ModelError naming the supported ones."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model_type {model_type!r} is not supported; supported: {supported}")
    return family
