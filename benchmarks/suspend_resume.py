"""Time suspends, resumes and weight updates, and the bare copies or prefills that they need.

    python benchmarks/suspend_resume.py            # a pool of 512 MiB, median of 20
    python benchmarks/suspend_resume.py --small    # a test run of seconds, whose times mean nothing

A program, run by hand. `benchmarks.memory_cycles` and `benchmarks.update_gaps` measure. The program
prints a Markdown page, and writes it and a JSON file to benchmarks/results, and a plot to
docs/suspend_resume.png.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.memory_cycles import (
    Cycles,
    Scenario,
    as_markdown,
    draw,
    measure_persist,
    measure_persist_growth,
    measure_recompute,
    measure_update,
)
from benchmarks.models import MODELS
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import at_least_one, dated, progress_bar, publish, results_parser
from benchmarks.update_gaps import measure_gaps

PLOT = Path(__file__).parents[1] / "docs" / "suspend_resume.png"
MODES = ("persist", "offload", "recompute")
KINDS = ("device", "reserved")
LIVE_FRACTIONS = (0.01, 0.25, 1.0)
NUM_PERSIST_REPEATS = 50
TOKENS_PER_UPDATE = 100


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = results_parser(__doc__, small="a tiny model and pool, two repeats")
    parser.add_argument("--repeats", type=at_least_one, default=20)
    parser.add_argument("--pool-mib", type=int, default=512)
    parser.add_argument("--updates", type=int, default=10, help="in-flight updates in each engine")
    parser.add_argument("--plot", type=Path, default=PLOT)
    arguments = parser.parse_args(argv)
    if arguments.small:
        arguments.repeats, arguments.pool_mib, arguments.updates = 2, 8, 2
    return arguments


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run all measurements, and return all figures as plain values."""
    spec = MODELS["small" if arguments.small else "m45"]
    rows = []
    with progress_bar(console) as progress:
        num_rows = len(KINDS) * len(LIVE_FRACTIONS)
        task = progress.add_task("suspend and resume", total=num_rows * arguments.repeats)
        for memory_kind in KINDS:
            cycles = Cycles(spec, pool_mib=arguments.pool_mib, memory_kind=memory_kind)
            for fraction in LIVE_FRACTIONS:
                scenarios = [Scenario(mode, memory_kind, fraction) for mode in MODES]
                for _ in range(arguments.repeats):
                    cycles.play_round(scenarios)
                    progress.advance(task)
                rows += [cycles.result(scenario) for scenario in scenarios]
            del cycles
    return {
        **dated(),
        "pool_mib": arguments.pool_mib,
        "repeats": arguments.repeats,
        "cycles": rows,
        "persist": measure_persist(spec, NUM_PERSIST_REPEATS),
        "persist_growth": measure_persist_growth(spec, NUM_PERSIST_REPEATS),
        "recompute": measure_recompute(spec, arguments.repeats),
        "update": measure_update(spec, arguments.repeats),
        "update_gaps": measure_gaps(spec, arguments.updates, TOKENS_PER_UPDATE),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    arguments = parse_arguments(argv)
    logging.getLogger("rollout").setLevel(logging.WARNING)
    console = Console(stderr=True)
    results = measure(arguments, console)
    draw(results, arguments.plot)
    publish(results, as_markdown(results), "suspend-resume", arguments.output, console)
    console.print(f"written: {arguments.plot}", highlight=False)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
