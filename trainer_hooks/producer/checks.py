"""What is refused before a producer begins."""

from __future__ import annotations

import inspect

from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams
from trainer_hooks.producer.scoped_llm import GeneratesAsync


def check_options(
    llm: GeneratesAsync,
    group_size: int,
    batch_groups: int,
    max_attempts: int,
    oversample_groups: int,
    sampling_params: SamplingParams,
) -> None:
    """Raise ConfigError for what could only fail later."""
    least = {"group_size": 1, "batch_groups": 1, "max_attempts": 1, "oversample_groups": 0}
    given = (group_size, batch_groups, max_attempts, oversample_groups)
    for (name, low), value in zip(least.items(), given, strict=True):
        if value < low:
            raise ConfigError(f"{name}={value} must be at least {low}")
    if not inspect.iscoroutinefunction(llm.generate):
        raise ConfigError(
            f"{type(llm).__name__}.generate cannot be awaited; use AsyncLLM, or wrap an LLM: "
            "ThreadedLLM(llm)"
        )
    if not sampling_params.return_prompt_tokens:
        raise ConfigError("return_prompt_tokens=False leaves nothing to train on; set it to True")
