"""Workloads of the generation benchmarks: prompts, and the length of every output.

Used by `benchmarks.generate`, `benchmarks.moe`, `benchmarks.rounds`, `benchmarks.contestants`, the
gpu modules and the peers modules of this folder. Needs only the standard library and NumPy, because
the peers' own environments import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, with `num_samples` samples of each. Samples of prompt i have `output_lens[i]`
    tokens.

    wants_logprobs: whether samples include the log-prob of each token.
    temperature: 1, or 0 for greedy decoding.
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
        """Number of output tokens in all samples."""
        return self.num_samples * sum(self.output_lens)

    def shortened(self, num_tokens: int) -> Workload:
        """Return the same prompts, with at most `num_tokens` output tokens per sample."""
        return replace(self, output_lens=tuple(min(n, num_tokens) for n in self.output_lens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Samples of a workload: all samples of the first prompt, then all of the second, and so on.

    logprobs: one row per sample, or None if the workload wants none.
    """

    tokens: list[list[int]]
    logprobs: Sequence[Any] | None


def require_what_was_asked(name: str, workload: Workload, generated: Generated) -> None:
    """Raise RuntimeError unless `generated` has the samples that the workload asks for."""
    wanted = [n for n in workload.output_lens for _ in range(workload.num_samples)]
    lengths = [len(tokens) for tokens in generated.tokens]
    scored = wanted if generated.logprobs is None else [len(row) for row in generated.logprobs]
    if lengths != wanted or scored != wanted or workload.wants_logprobs != bool(generated.logprobs):
        raise RuntimeError(f"{name} did not generate what {workload.name} asks for")


def group_workload(
    vocab_size: int, *, num_prompts: int, num_samples: int, prompt_len: int, output_len: int
) -> Workload:
    """Return W1: groups of samples as in GRPO, at temperature 1, with log-probs."""
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
    """Return W2: one sample per prompt, with geometric lengths in the given bounds."""
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
    """Return W1 and W2 by name. Small workloads only show that programs run."""
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
    """Return prompts of random token ids with these lengths. Equal arguments give equal prompts."""
    random = np.random.default_rng(seed)
    return tuple(tuple(random.integers(0, vocab_size, size=n).tolist()) for n in prompt_lens)
