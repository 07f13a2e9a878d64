"""Formats results of generation as JSON and as a Markdown page.

Used by `benchmarks.generate` and `benchmarks.moe`, which write the files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.floor import StepCost
from benchmarks.pages import table_row
from benchmarks.rounds import Contest


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestResult:
    """The rounds of one workload, and their floor.

    floor_seconds: CPU seconds of the bare matrix products of one round, or None if not measured.
    """

    contest: Contest
    floor_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All measurements of one run of the benchmark.

    steps: decode steps and their floors.
    largest_logprob_error: largest error of our log-probs, or None if not measured.
    """

    date: str
    machine: dict[str, str | int]
    model: str
    num_parameters: int
    contests: Sequence[ContestResult]
    steps: Sequence[StepCost]
    largest_logprob_error: float | None


def as_json(results: Results) -> dict[str, Any]:
    """Return the results as values for json.dumps, with every round and decode step."""
    return {
        "date": results.date,
        "machine": results.machine,
        "model": results.model,
        "num_parameters": results.num_parameters,
        "largest_logprob_error": results.largest_logprob_error,
        "workloads": {c.contest.workload.name: _contest_json(c) for c in results.contests},
        "decode_steps": [asdict(step) for step in results.steps],
    }


def _contest_json(result: ContestResult) -> dict[str, Any]:
    contest = result.contest
    return {
        "summary": contest.workload.summary,
        "num_tokens": contest.workload.num_tokens,
        "rounds": [asdict(r) for r in contest.rounds],
        "median_ratio": contest.median_ratio,
        "smallest_ratio": contest.smallest_ratio,
        "floor_cpu_seconds": result.floor_seconds,
        "over_floor": result.floor_seconds and _own_seconds(contest) / result.floor_seconds,
    }


def _own_seconds(contest: Contest) -> float:
    """Return our engine's median CPU seconds of a round."""
    return statistics.median(r.cpu_seconds[contest.ours.name] for r in contest.rounds)


def as_markdown(results: Results) -> str:
    """Return a Markdown page: the machine, a table per workload, and decode steps with their
    floors."""
    machine = results.machine
    lines = [
        f"# Generation, {results.date}",
        "",
        f"{machine['cpu']} (family/model {machine['cpu_family_model']}, "
        f"{machine['instruction_set']}, {machine['num_cores']} cores), {machine['threads']} "
        f"thread, torch {machine['torch']}, transformers {machine['transformers']}, "
        f"Python {machine['python']}; {machine['ops']}, {machine['attention']}.",
        "",
        f"Model {results.model}: {results.num_parameters / 1e6:.1f}M parameters, random, float32. "
        "Tokens per CPU second; only tokens that were asked for count. Every round runs each "
        "contestant once; the ratio is to the best of them in the same round.",
    ]
    for result in results.contests:
        lines += ["", *_contest_lines(result)]
    if results.steps:
        lines += ["", *_step_lines(results.steps)]
    if results.largest_logprob_error is not None:
        lines += [
            "",
            "Largest difference of a log-prob to a full forward pass of the transformers model: "
            f"{results.largest_logprob_error:.1e}.",
        ]
    return "\n".join(lines) + "\n"


def _contest_lines(result: ContestResult) -> list[str]:
    contest = result.contest
    numbers = [str(index + 1) for index in range(len(contest.rounds))]
    lines = [
        f"## {contest.workload.name}: {contest.workload.summary}",
        "",
        f"| | {' | '.join('round ' + n for n in numbers)} |",
        "|---|" + "---:|" * len(numbers),
    ]
    for name in contest.rounds[0].cpu_seconds:
        speeds = [r.tokens_per_cpu_second.get(name) for r in contest.rounds]
        lines.append(table_row([name, *("-" if s is None else f"{s:.0f}" for s in speeds)]))
    lines.append(table_row(["**ratio**", *(f"**{r.ratio:.2f}**" for r in contest.rounds)]))
    knowing = [r.ratio_knowing_lengths for r in contest.rounds]
    if contest.rounds[0].best_peer_knowing_lengths is not None:
        cells = ["-" if r is None else f"{r:.2f}" for r in knowing]
        lines.append(table_row(["ratio to batches sorted by length", *cells]))
    floor = ""
    if result.floor_seconds is not None:
        floor = f"; the bare matrix products of the same steps take {result.floor_seconds:.2f}"
    lines += [
        "",
        f"Median ratio {contest.median_ratio:.2f}, smallest {contest.smallest_ratio:.2f}. "
        f"{contest.workload.num_tokens} tokens in {_own_seconds(contest):.2f} CPU seconds "
        f"(median){floor}.",
    ]
    if any(r is not None for r in knowing):
        lines += [
            "",
            "Sorting by output length needs lengths that are not known before generation; it is "
            "shown as the best that padded batches could do.",
        ]
    return lines


def _step_lines(steps: Sequence[StepCost]) -> list[str]:
    lines = [
        "## A decode step over its floor",
        "",
        "| batch | context | step, ms | bare matrix products, ms | ratio | fastest product |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for s in steps:
        cells = [f"{s.batch}", f"{s.context}", f"{s.step_ms:.1f}", f"{s.floor_ms:.1f}"]
        lines.append(table_row([*cells, f"**{s.ratio:.2f}**", s.floor_product]))
    return lines
