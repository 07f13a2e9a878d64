"""The platform: none of those that vLLM's tests ask for."""

from __future__ import annotations

from vllm import absent_names


class _Platform:
    def __getattr__(self, name: str) -> object:
        if not name.startswith("is_"):
            raise AttributeError(name)
        return lambda: name == "is_cpu"


current_platform = _Platform()

__getattr__ = absent_names(__name__, __path__)
