"""BenchLoad: the prompts of a benchmark, and how many tokens each of its requests generates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.cli.settings import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """Prompts of random ids in [1, max_token_id]. Raises UsageError for a number below 1."""

    num_prompts: int = 64
    prompt_tokens: int = 128
    num_tokens: int = 128
    max_token_id: int = 100

    def __post_init__(self) -> None:
        self._check_counts("num_prompts", "prompt_tokens", "num_tokens", "max_token_id")

    def prompts(self) -> list[list[int]]:
        """Return the prompts, which are the same in each run."""
        generator = np.random.default_rng(0)
        shape = (self.num_prompts, self.prompt_tokens)
        ids: list[list[int]] = generator.integers(1, self.max_token_id + 1, shape).tolist()
        return ids

    def _check_counts(self, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) < 1:
                raise UsageError(f"{name}={value} must be at least 1")
