"""Compare generation with transformers' `generate`, in tokens per CPU second of one thread.

    python benchmarks/generate.py                  # three rounds of W1 and W2
    python benchmarks/generate.py --rounds 1 --workloads W1
    python benchmarks/generate.py --small          # seconds: shows that it runs, not how fast

A program, run by hand. Also used by `benchmarks.moe`, for `logprob_error` and
`measure_and_publish`. It writes a Markdown page and a JSON file to benchmarks/results, named after
the day, the model and the machine.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import Any

import transformers
from rich.console import Console
from rich.progress import Progress, TaskID

from benchmarks.contestants import RolloutEngine, largest_logprob_error, transformers_contestants
from benchmarks.floor import MatmulFloor, StepCost, StepTrace, decode_step_cost, total_seconds
from benchmarks.models import MODELS, num_parameters, transformers_model
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, progress_bar, publish, results_parser
from benchmarks.report import ContestResult, Results, as_json, as_markdown
from benchmarks.rounds import Contest, play_round, warm_up
from benchmarks.workloads import Workload, workloads
from rollout import LLM, InferenceConfig

STEP_BATCHES = (1, 64)
STEP_REPEATS = 24


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = results_parser(__doc__, rounds=3, small="a tiny model and workload")
    parser.add_argument("--workloads", nargs="+", choices=("W1", "W2"), default=["W1", "W2"])
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, console: Console) -> Results:
    """Run all rounds of the workloads, then decode steps and their floors, and return all
    results."""
    model_name = "small" if arguments.small else "m45"
    spec = MODELS[model_name]
    model = transformers_model(spec)
    trace = StepTrace()
    config = InferenceConfig(
        num_threads=1,
        max_sequence_length=512,
        buffer_size_gb=1.0,
        metrics_writer=trace,
        logging_step_interval=1,
    )
    chosen = workloads(spec.vocab_size, is_small=arguments.small)
    floor = MatmulFloor(model, config)
    contests, error = [], None
    with LLM(model, inference_config=config) as llm, progress_bar(console) as progress:
        ours = RolloutEngine(llm)
        for name in arguments.workloads:
            peers = transformers_contestants(model, chosen[name])
            contest = Contest(workload=chosen[name], ours=ours, peers=list(peers))
            contests.append(_play(contest, arguments.rounds, floor, trace, progress))
        if "W1" in arguments.workloads:
            error = logprob_error(model, ours, chosen["W1"])
        steps = _decode_steps(llm, floor, spec.vocab_size, progress)
    return Results(
        **dated(config),
        model=model_name,
        num_parameters=num_parameters(spec),
        contests=contests,
        steps=steps,
        largest_logprob_error=error,
    )


def _play(
    contest: Contest, num_rounds: int, floor: MatmulFloor, trace: StepTrace, progress: Progress
) -> ContestResult:
    name = contest.workload.name
    task = progress.add_task(f"{name}: warm-up", total=num_rounds)
    warm_up(contest)
    trace.clear()
    for number in range(1, num_rounds + 1):
        play_round(contest, _announcer(progress, task, f"{name}, round {number}"))
        ratio = contest.rounds[-1].ratio
        progress.update(task, advance=1, description=f"{name}: ratio {ratio:.2f}")
    forked = (contest.workload.num_samples - 1) * len(contest.workload.prompts)
    steps = trace.take_runs(num_rounds, num_forked=forked)
    return ContestResult(contest=contest, floor_seconds=total_seconds(floor, steps))


def _announcer(progress: Progress, task: TaskID, where: str) -> Callable[[str], None]:
    return lambda who: progress.update(task, description=f"{where}: {who}")


def logprob_error(model: Any, ours: RolloutEngine, workload: Workload) -> float:
    """Return the largest difference between our log-probs and a full forward pass of `model`."""
    short = workload.shortened(8)
    return largest_logprob_error(model, short, ours.run(short, seed=0))


def _decode_steps(
    llm: LLM, floor: MatmulFloor, vocab_size: int, progress: Progress
) -> list[StepCost]:
    task = progress.add_task("decode steps and their floor", total=len(STEP_BATCHES))
    costs = []
    for batch in STEP_BATCHES:
        cost = decode_step_cost(
            llm.engine, floor, batch, vocab_size=vocab_size, num_steps=STEP_REPEATS
        )
        costs.append(cost)
        progress.advance(task)
    return costs


def measure_and_publish(
    measure: Callable[[argparse.Namespace, Console], Results], arguments: argparse.Namespace
) -> Results:
    """Call `measure`, print and write its results, and return them."""
    transformers.logging.set_verbosity_error()
    logging.getLogger("rollout").setLevel(logging.WARNING)
    console = Console(stderr=True)
    results = measure(arguments, console)
    publish(as_json(results), as_markdown(results), results.model, arguments.output, console)
    return results


def main(argv: Sequence[str] | None = None) -> Results:
    """Run the benchmark and return the results."""
    return measure_and_publish(measure, parse_arguments(argv))


if __name__ == "__main__":
    restart_with_one_thread()
    main()
