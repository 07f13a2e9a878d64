"""BenchLoad: the prompts of a benchmark, and how many tokens each of its requests generates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.cli.settings import UsageError
from rollout.ranges import PositiveInt, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """Prompts of random ids in [1, max_token_id]. Raises UsageError for a number below 1."""

    num_prompts: PositiveInt = 64
    prompt_tokens: PositiveInt = 128
    num_tokens: PositiveInt = 128
    max_token_id: PositiveInt = 100

    def __post_init__(self) -> None:
        check_fields(self, UsageError)

    def prompts(self) -> list[list[int]]:
        """Return the prompts, which are the same in each run."""
        generator = np.random.default_rng(0)
        shape = (self.num_prompts, self.prompt_tokens)
        ids: list[list[int]] = generator.integers(1, self.max_token_id + 1, shape).tolist()
        return ids
