"""vLLM's environment variables, all unset."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if not name.startswith("VLLM_"):
        raise AttributeError(name)
    return False
