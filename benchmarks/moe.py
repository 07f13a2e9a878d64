"""Compare generation of a mixture of experts with transformers' `generate`, on one thread.

    python -m benchmarks.moe                # three rounds of W1
    python -m benchmarks.moe --small        # seconds: shows that it runs, not how fast

A program, run by hand. The model has random weights and 64 experts. Each token uses 8.
transformers runs with two implementations of experts, "grouped_mm" and "eager". The program prints
a Markdown page, and writes it and a JSON file to benchmarks/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.contestants import RolloutEngine, TransformersGenerate
from benchmarks.generate import logprob_error, measure_and_publish
from benchmarks.models import MOE64, SMALL_MOE, transformers_model
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, results_parser
from benchmarks.report import ContestResult, Results
from benchmarks.rounds import Contest, play_round, warm_up
from benchmarks.workloads import Generated, Workload, workloads
from rollout import LLM, InferenceConfig

# "batched_mm" would copy the weights of each token's experts: 64 GB for the prompts of W1.
EXPERTS = ("grouped_mm", "eager")
CACHES = ("dynamic", "static")


class TransformersMixture(TransformersGenerate):
    """transformers' `generate` with the experts implementation `experts`."""

    def __init__(self, model: Any, *, cache: str, experts: str) -> None:
        super().__init__(model, cache=cache)
        self.name = f"transformers {cache} cache, {experts} experts"
        self._experts = experts

    def run(self, workload: Workload, seed: int) -> Generated:
        """Select the experts implementation, then generate."""
        self._model.set_experts_implementation(self._experts)
        return super().run(workload, seed)


def measure(arguments: argparse.Namespace, console: Console) -> Results:
    """Run all rounds of W1, and compare our log-probs with a transformers forward pass."""
    spec = SMALL_MOE if arguments.small else MOE64
    model = transformers_model(spec)
    workload = workloads(spec.vocab_size, is_small=arguments.small)["W1"]
    config = InferenceConfig(num_threads=1, max_sequence_length=512, buffer_size_gb=1.0)
    with LLM(model, inference_config=config) as llm:
        ours = RolloutEngine(llm)
        peers = [
            TransformersMixture(model, cache=cache, experts=experts)
            for experts in EXPERTS
            for cache in CACHES
        ]
        contest = Contest(workload=workload, ours=ours, peers=list(peers))
        warm_up(contest)
        for number in range(1, arguments.rounds + 1):
            play_round(contest, lambda _: None)
            console.print(f"round {number}: ratio {contest.rounds[-1].ratio:.2f}")
        error = logprob_error(model, ours, workload)
    return Results(
        **dated(config),
        model="moe-small" if arguments.small else "moe64",
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        contests=[ContestResult(contest=contest)],
        steps=[],
        largest_logprob_error=error,
    )


def main(argv: Sequence[str] | None = None) -> Results:
    """Run the benchmark and return the results."""
    parser = results_parser(__doc__, rounds=3, small="a tiny model and workload")
    return measure_and_publish(measure, parser.parse_args(argv))


if __name__ == "__main__":
    restart_with_one_thread()
    main()
