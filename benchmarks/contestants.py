"""Engines that are compared in one process: rollout.LLM and transformers' `generate`.

Used by `benchmarks.generate`, `benchmarks.moe`, `benchmarks.rounds`, `benchmarks.report`,
`benchmarks.gpu_measures`, `benchmarks.peers_rollout` and `benchmarks.peers_transformers`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.workloads import Generated, Workload, require_what_was_asked
from rollout import LLM, SamplingParams


class Contestant(Protocol):
    """An engine with its settings, which can run a workload."""

    name: str
    knows_lengths: bool  # whether it uses output lengths, which are unknown in practice

    def run(self, workload: Workload, seed: int) -> Generated:
        """Generate all samples of the workload."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Samples of one run, and its CPU seconds over all threads of this process."""

    cpu_seconds: float
    generated: Generated


def timed(contestant: Contestant, workload: Workload, seed: int) -> Timed:
    """Run a contestant once, and time it.

    Raises RuntimeError if a number or length of samples differs from the workload's.
    """
    start = time.process_time()
    generated = contestant.run(workload, seed)
    seconds = time.process_time() - start
    require_what_was_asked(contestant.name, workload, generated)
    return Timed(cpu_seconds=seconds, generated=generated)


class RolloutEngine:
    """rollout.LLM with one group per prompt. Each request ends at its own output length."""

    name = "rollout"
    knows_lengths = False

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def run(self, workload: Workload, seed: int) -> Generated:
        """Submit all groups, then collect all."""
        params = [
            SamplingParams(
                num_tokens_to_generate=length,
                ignore_eos=True,
                temperature=workload.temperature,
                return_log_probs=workload.wants_logprobs,
                seed=seed,
            )
            for length in workload.output_lens
        ]
        group_ids = self.llm.submit(workload.prompts, params, n=workload.num_samples)
        groups = {group.group_id: group for group in self.llm.collect()}
        requests = [r for group_id in group_ids for r in groups[group_id].requests]
        logprobs = [r.generated_log_probs for r in requests if r.generated_log_probs is not None]
        return Generated(
            tokens=[r.generated_tokens for r in requests],
            logprobs=logprobs if workload.wants_logprobs else None,
        )


class TransformersGenerate:
    """transformers' `generate`, called once per batch of prompts.

    A batch runs until its longest output ends. Tokens of shorter outputs beyond their length are
    dropped. torch.compile is switched off.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache: str,
        batch_size: int | None = None,
        sorts_by_length: bool = False,
    ) -> None:
        """`cache` names a transformers cache implementation, such as "static".

        `batch_size` is the number of prompts in a batch, or None for one batch of all prompts.
        `sorts_by_length` puts prompts with similar output lengths into one batch.
        """
        batches = "one batch" if batch_size is None else f"batches of {batch_size}"
        order = " sorted by length" if sorts_by_length else ""
        self.name = f"transformers {cache} cache, {batches}{order}"
        self.knows_lengths = sorts_by_length
        self._model, self._cache, self._batch_size = model, cache, batch_size

    def run(self, workload: Workload, seed: int) -> Generated:
        """Run all batches one after another, and return the samples in the order of the prompts."""
        torch.manual_seed(seed)
        order = list(range(len(workload.prompts)))
        if self.knows_lengths:
            order.sort(key=workload.output_lens.__getitem__)
        size = self._batch_size or len(order)
        tokens: dict[int, list[list[int]]] = {}
        logprobs: dict[int, list[list[float]]] = {}
        for start in range(0, len(order), size):
            self._run_batch(workload, order[start : start + size], tokens, logprobs)
        prompts = range(len(workload.prompts))
        return Generated(
            tokens=[row for index in prompts for row in tokens[index]],
            logprobs=[row for index in prompts for row in logprobs[index]]
            if workload.wants_logprobs
            else None,
        )

    @torch.inference_mode()
    def _run_batch(
        self,
        workload: Workload,
        indices: Sequence[int],
        tokens: dict[int, list[list[int]]],
        logprobs: dict[int, list[list[float]]],
    ) -> None:
        """Generate for the prompts `indices`, and put the samples into `tokens` and `logprobs`."""
        prompts = torch.tensor(
            [workload.prompts[index] for index in indices], device=self._model.device
        )
        output = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_return_sequences=workload.num_samples,
            max_new_tokens=max(workload.output_lens[index] for index in indices),
            do_sample=workload.temperature > 0,
            temperature=workload.temperature or None,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=self._cache,
            disable_compile=True,  # on a GPU, transformers would compile with a static cache
            return_dict_in_generate=True,
            output_logits=workload.wants_logprobs,
        )
        new_tokens = output.sequences[:, prompts.shape[1] :]
        scores = _logprobs(output.logits, new_tokens) if workload.wants_logprobs else None
        for place, index in enumerate(indices):
            length = workload.output_lens[index]
            rows = slice(place * workload.num_samples, (place + 1) * workload.num_samples)
            tokens[index] = new_tokens[rows, :length].tolist()
            if scores is not None:
                logprobs[index] = scores[rows, :length].tolist()


def _logprobs(logits: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each token, [rows, steps]."""
    # One logsumexp per step is cheaper than a log-softmax of all logits.
    columns = [
        step.gather(1, tokens[:, [index]]).squeeze(1) - step.logsumexp(1)
        for index, step in enumerate(logits)
    ]
    return torch.stack(columns, dim=1)


def transformers_contestants(model: Any, workload: Workload) -> list[TransformersGenerate]:
    """Return `generate` with a dynamic and with a static cache, on one batch.

    If output lengths differ, smaller batches are added, unsorted and sorted by length.
    """
    contestants = [TransformersGenerate(model, cache=cache) for cache in ("dynamic", "static")]
    if len(set(workload.output_lens)) > 1:
        half, quarter = (max(1, len(workload.prompts) // parts) for parts in (2, 4))
        contestants += [
            TransformersGenerate(model, cache="dynamic", batch_size=size, sorts_by_length=is_sorted)
            for size, is_sorted in ((half, False), (half, True), (quarter, True))
        ]
    return contestants


@torch.inference_mode()
def largest_logprob_error(model: Any, workload: Workload, generated: Generated) -> float:
    """Return the largest error of the log-probs in `generated`.

    The expected log-probs come from a full forward pass of the transformers model.
    """
    assert generated.logprobs is not None
    prompts = [p for p in workload.prompts for _ in range(workload.num_samples)]
    worst = 0.0
    for prompt, tokens, logprobs in zip(prompts, generated.tokens, generated.logprobs, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        worst = max(worst, float((expected - torch.as_tensor(logprobs)).abs().max()))
    return worst
