"""Time of a decode step of an engine of two ranks, and of an engine in one process.

    python benchmarks/tensor_parallel.py            # minutes
    python benchmarks/tensor_parallel.py --small    # seconds: shows that it runs, not how well

A program, run by hand. It measures batches of 1 and 16 rows. The engines take turns, a few steps at
a time. Two ranks need two free CPUs: on a busy machine the least time of a step shows more than the
median. The program prints a Markdown page, and writes it and a JSON file to benchmarks/results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.console import Console

from benchmarks.models import QWEN_05B, SMALL
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, publish, results_parser
from rollout import DynamicInferenceEngine, InferenceConfig, SamplingParams
from rollout.models.spec import ModelSpec

BATCHES = (1, 16)
PROMPT_TOKENS, STEPS_AT_ONCE = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine of `num_ranks` processes, each with `num_threads` threads."""

    name: str
    num_ranks: int
    num_threads: int


CONTESTANTS = (
    Contestant(name="one process, one thread", num_ranks=1, num_threads=1),
    Contestant(name="one process, two threads", num_ranks=1, num_threads=2),
    Contestant(name="two ranks, one thread each", num_ranks=2, num_threads=1),
)


class Steps:
    """An engine with `batch` rows, which decode for at least `num_steps` steps."""

    def __init__(self, spec: ModelSpec, contestant: Contestant, batch: int, num_steps: int) -> None:
        self.contestant = contestant
        config = InferenceConfig(
            device="cpu",
            num_threads=contestant.num_threads,
            tensor_parallel_size=contestant.num_ranks,
            max_requests=batch,
            max_sequence_length=PROMPT_TOKENS + num_steps + 8,
        )
        self.engine = DynamicInferenceEngine.from_model(spec, config)
        params = SamplingParams(
            num_tokens_to_generate=num_steps + 4, temperature=0.0, ignore_eos=True
        )
        for row in range(batch):
            self.engine.add_request([row + 1] * PROMPT_TOKENS, params)
        for _ in range(2):
            self.engine.step()

    def measure(self, num_steps: int) -> list[tuple[float, float]]:
        """Run `num_steps` steps. Returns each step's wall seconds and rank 0's CPU seconds."""
        torch.set_num_threads(self.contestant.num_threads)
        times = []
        for _ in range(num_steps):
            wall, cpu = time.perf_counter(), time.process_time()
            self.engine.step()
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
        return times


def measure(spec: ModelSpec, batch: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the least, median and CPU milliseconds of a step, by name of the engine."""
    num_steps = num_rounds * STEPS_AT_ONCE
    steps = [Steps(spec, contestant, batch, num_steps) for contestant in CONTESTANTS]
    times: dict[str, list[tuple[float, float]]] = {c.name: [] for c in CONTESTANTS}
    for _ in range(num_rounds):
        for each in steps:
            times[each.contestant.name] += each.measure(STEPS_AT_ONCE)
    for each in steps:
        each.engine.shutdown()
    return {
        name: {
            "least_ms": 1e3 * min(wall for wall, _ in found),
            "median_ms": 1e3 * median(wall for wall, _ in found),
            "cpu_ms": 1e3 * median(cpu for _, cpu in found),
        }
        for name, found in times.items()
    }


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row for each batch size and engine."""
    machine, load = results["machine"], results["load_average"]
    lines = [
        f"# Tensor parallel, {results['date']}",
        "",
        f"{machine['cpu']}, {results['num_processors']} processors, torch {machine['torch']}. "
        f"Decode steps of {results['model']} in {results['dtype']}, {results['num_steps']} of each "
        f"contestant, {STEPS_AT_ONCE} at a time in turn. Ranks add up through shared memory. Load "
        f"average of the machine, with this: {load[0]:.1f} before, {load[1]:.1f} after. CPU time "
        "is that of rank 0, waiting in a loop for the other included.",
        "",
        "| batch | engine | least ms | median ms | CPU ms | least, relative to one thread |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for batch, by_name in results["steps"].items():
        first = by_name[CONTESTANTS[0].name]["least_ms"]
        lines += [
            f"| {batch} | {name} | {t['least_ms']:.1f} | {t['median_ms']:.1f} | "
            f"{t['cpu_ms']:.1f} | **{first / t['least_ms']:.2f}** |"
            for name, t in by_name.items()
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    arguments = results_parser(__doc__, rounds=10, small="a tiny model, one round").parse_args(argv)
    spec = SMALL if arguments.small else replace(QWEN_05B, dtype=torch.bfloat16)
    num_rounds = 1 if arguments.small else arguments.rounds
    before = os.getloadavg()[0]
    steps = {str(batch): measure(spec, batch, num_rounds) for batch in BATCHES}
    results = {
        **dated(),
        "num_processors": len(os.sched_getaffinity(0)),
        "model": "a tiny model" if arguments.small else "the shape of Qwen2.5-0.5B",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "num_steps": num_rounds * STEPS_AT_ONCE,
        "load_average": [before, os.getloadavg()[0]],
        "steps": steps,
    }
    console = Console(stderr=True)
    publish(results, as_markdown(results), "tensor-parallel", arguments.output, console)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
