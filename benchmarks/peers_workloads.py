"""The workloads W1 to W4 of `benchmarks.peers`. Every round has new prompts.

Used by `benchmarks.peers`, `benchmarks.peers_rounds` and `benchmarks.peers_report`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.workloads import (
    Workload,
    group_workload,
    ragged_workload,
    random_prompts,
    workloads,
)

GREEDY_TOKENS = 16
_WARM_UP_TOKENS = 3
# Assumed speed of a core and of its memory, to estimate a contestant's seconds.
_FLOPS = 25e9
_BYTES_PER_SECOND = 8e9
_STEP_OVERHEAD_S = 5e-3

Size = Literal["small", "reduced", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A workload, and the tokens that count for its speed.

    counted: kind of the counted tokens, "output" or "prompt".
    num_counted: number of these tokens.
    """

    workload: Workload
    num_counted: int
    counted: str
    vocab_size: int

    @property
    def name(self) -> str:
        return self.workload.name

    def of_round(self, index: int) -> Workload:
        """Return the workload with new random prompts of the same lengths. `index` is the seed."""
        lengths = [len(prompt) for prompt in self.workload.prompts]
        prompts = random_prompts(self.vocab_size, lengths, seed=1 + index)
        return replace(self.workload, prompts=prompts)

    def warm_up(self) -> Workload:
        """Return the workload with at most three new tokens per sample."""
        return self.workload.shortened(_WARM_UP_TOKENS)

    def estimated_seconds(self, num_parameters: int, num_threads: int) -> float:
        """Return estimated seconds of an engine, from matrix products and reads of weights."""
        num_tokens = sum(map(len, self.workload.prompts)) + self.workload.num_tokens
        products_s = num_tokens * 2 * num_parameters / _FLOPS
        step_s = _STEP_OVERHEAD_S + 4 * num_parameters / _BYTES_PER_SECOND
        return (products_s + max(self.workload.output_lens) * step_s) / num_threads


def contests(vocab_size: int, size: Size) -> dict[str, Contest]:
    """Return all contests by name.

    "small" contests only show that the program runs. "reduced" contests have fewer tokens than
    "full" ones, for models that take minutes per round.
    """
    if size == "reduced":
        sampled = _reduced(vocab_size)
        stream_lens, prefill_len = (32, 16), 512
    else:
        sampled = workloads(vocab_size, is_small=size == "small")
        stream_lens, prefill_len = ((8, 6), 32) if size == "small" else ((64, 128), 2048)
    one_stream = _single("W3", vocab_size, *stream_lens)
    prefill = _single("W4", vocab_size, prefill_len, 1)
    return {
        workload.name: Contest(
            workload=workload,
            num_counted=prefill_len if workload is prefill else workload.num_tokens,
            counted="prompt" if workload is prefill else "output",
            vocab_size=vocab_size,
        )
        for workload in (sampled["W1"], sampled["W2"], one_stream, prefill)
    }


def greedy_workload(contest: Contest) -> Workload:
    """Return a workload that decodes greedily after each prompt of the contest."""
    workload = contest.workload
    return replace(
        workload,
        name="greedy",
        num_samples=1,
        wants_logprobs=False,
        temperature=0.0,
        output_lens=(GREEDY_TOKENS,) * len(workload.prompts),
    )


def _reduced(vocab_size: int) -> dict[str, Workload]:
    group = group_workload(vocab_size, num_prompts=8, num_samples=8, prompt_len=32, output_len=8)
    ragged = ragged_workload(
        vocab_size, num_prompts=32, prompt_len=16, shortest=2, mean=16, longest=64
    )
    return {"W1": group, "W2": ragged}


def _single(name: str, vocab_size: int, prompt_len: int, output_len: int) -> Workload:
    new = "1 new token" if output_len == 1 else f"{output_len} new tokens"
    return Workload(
        name=name,
        summary=f"one request, a prompt of {prompt_len} tokens, {new}, temperature 1",
        prompts=random_prompts(vocab_size, [prompt_len]),
        output_lens=(output_len,),
        num_samples=1,
        wants_logprobs=False,
    )
