"""A package of vLLM."""

from __future__ import annotations

from vllm import absent_names

__getattr__ = absent_names(__name__, __path__)
