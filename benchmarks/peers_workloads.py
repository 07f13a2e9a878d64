"""What is generated, W1 to W4, with prompts of its own for every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.workloads import Workload, workloads

GREEDY_TOKENS = 16
_WARM_UP_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A workload, and the tokens that its speed counts: those of the output, or of the prompt."""

    workload: Workload
    num_counted: int
    counted: str
    vocab_size: int

    @property
    def name(self) -> str:
        return self.workload.name

    def of_round(self, index: int) -> Workload:
        """With other prompts of the same lengths, so that no cache knows them from before."""
        return replace(
            self.workload,
            prompts=_prompts(self.vocab_size, self.workload.prompts, seed=1 + index),
        )

    def warm_up(self) -> Workload:
        """Everything that a round does, a few times only."""
        return self.workload.shortened(_WARM_UP_TOKENS)


def contests(vocab_size: int, *, is_small: bool) -> dict[str, Contest]:
    """All of them by name. Small ones show nothing but that they run."""
    sampled = workloads(vocab_size, is_small=is_small)
    one_stream = _single(
        sampled["W2"],
        name="W3",
        prompt_len=8 if is_small else 64,
        output_len=6 if is_small else 128,
        vocab_size=vocab_size,
    )
    prefill = _single(
        sampled["W2"],
        name="W4",
        prompt_len=32 if is_small else 2048,
        output_len=1,
        vocab_size=vocab_size,
    )
    return {
        workload.name: Contest(
            workload=workload,
            num_counted=len(workload.prompts[0]) if workload is prefill else workload.num_tokens,
            counted="prompt" if workload is prefill else "output",
            vocab_size=vocab_size,
        )
        for workload in (sampled["W1"], sampled["W2"], one_stream, prefill)
    }


def greedy_workload(contest: Contest) -> Workload:
    """The first tokens of each prompt of a contest without chance."""
    workload = replace(
        contest.workload, name="greedy", num_samples=1, wants_logprobs=False, temperature=0.0
    )
    return workload.shortened(GREEDY_TOKENS)


def _single(
    like: Workload, *, name: str, prompt_len: int, output_len: int, vocab_size: int
) -> Workload:
    new = "1 new token" if output_len == 1 else f"{output_len} new tokens"
    return replace(
        like,
        name=name,
        summary=f"one request, a prompt of {prompt_len} tokens, {new}, temperature 1",
        prompts=_prompts(vocab_size, [range(prompt_len)], seed=0),
        output_lens=(output_len,),
    )


def _prompts(
    vocab_size: int, like: Sequence[Sequence[int]], *, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Random prompts with the lengths of `like`."""
    random = np.random.default_rng(seed)
    return tuple(tuple(random.integers(0, vocab_size, len(prompt)).tolist()) for prompt in like)
