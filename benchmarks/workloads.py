"""The workloads of the generation benchmarks: the same token counts for every contestant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`num_samples` samples of each prompt, `output_lens[i]` tokens long for prompt i.

    `temperature` is 1, or 0 for the likeliest tokens.
    """

    name: str
    summary: str
    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]
    num_samples: int
    wants_logprobs: bool
    temperature: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Useful tokens: those that were asked for."""
        return self.num_samples * sum(self.output_lens)

    def shortened(self, num_tokens: int) -> Workload:
        """The same requests, cut to `num_tokens` tokens each."""
        return replace(self, output_lens=tuple(min(n, num_tokens) for n in self.output_lens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Samples of a workload, prompt-major; `logprobs` is None if the workload wants none."""

    tokens: list[list[int]]
    logprobs: Sequence[Any] | None


def require_what_was_asked(name: str, workload: Workload, generated: Generated) -> None:
    """Raises RuntimeError unless `name` generated exactly what the workload asks for."""
    wanted = [n for n in workload.output_lens for _ in range(workload.num_samples)]
    lengths = [len(tokens) for tokens in generated.tokens]
    scored = wanted if generated.logprobs is None else [len(row) for row in generated.logprobs]
    if lengths != wanted or scored != wanted or workload.wants_logprobs != bool(generated.logprobs):
        raise RuntimeError(f"{name} did not generate what {workload.name} asks for")


def group_workload(
    vocab_size: int, *, num_prompts: int, num_samples: int, prompt_len: int, output_len: int
) -> Workload:
    """Groups of samples, as GRPO wants them: sampled at temperature 1, with log-probs."""
    return Workload(
        name="W1",
        summary=f"{num_prompts} prompts of {prompt_len} tokens x {num_samples} samples, "
        f"{output_len} new tokens each, temperature 1, with log-probs",
        prompts=random_prompts(vocab_size, [prompt_len] * num_prompts),
        output_lens=(output_len,) * num_prompts,
        num_samples=num_samples,
        wants_logprobs=True,
    )


def ragged_workload(
    vocab_size: int, *, num_prompts: int, prompt_len: int, shortest: int, mean: int, longest: int
) -> Workload:
    """Single samples of very different lengths: geometric with `mean`, clipped."""
    drawn = np.random.default_rng(0).geometric(1 / mean, size=num_prompts)
    lengths = tuple(int(n) for n in np.clip(drawn, shortest, longest))
    return Workload(
        name="W2",
        summary=f"{num_prompts} requests, prompts of {prompt_len} tokens, {min(lengths)} to "
        f"{max(lengths)} new tokens (mean {np.mean(lengths):.0f}), temperature 1",
        prompts=random_prompts(vocab_size, [prompt_len] * num_prompts),
        output_lens=lengths,
        num_samples=1,
        wants_logprobs=False,
    )


def workloads(vocab_size: int, *, is_small: bool) -> dict[str, Workload]:
    """The workloads by name; small ones take a second and show nothing but that they run."""
    if is_small:
        grouped = group_workload(
            vocab_size, num_prompts=2, num_samples=3, prompt_len=12, output_len=5
        )
        ragged = ragged_workload(
            vocab_size, num_prompts=5, prompt_len=8, shortest=2, mean=4, longest=9
        )
    else:
        grouped = group_workload(
            vocab_size, num_prompts=8, num_samples=8, prompt_len=128, output_len=64
        )
        ragged = ragged_workload(
            vocab_size, num_prompts=32, prompt_len=64, shortest=8, mean=64, longest=256
        )
    return {workload.name: workload for workload in (grouped, ragged)}


def random_prompts(
    vocab_size: int, prompt_lens: Sequence[int], seed: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Random tokens, the same on every call with the same seed."""
    random = np.random.default_rng(seed)
    return tuple(tuple(random.integers(0, vocab_size, size=n).tolist()) for n in prompt_lens)
