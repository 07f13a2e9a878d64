"""Time and page faults of pushing a trainer's weights to an engine in the same process.

    python -m benchmarks.pushes            # a minute; needs SmolLM2 (extra smollm2)
    python -m benchmarks.pushes --small    # seconds, with a tiny model: shows that it runs

A program, run by hand, in float32 on one thread. It measures two pushes: to an engine that has
discarded its weights in a suspend, and to an engine that serves them. The program prints CPU and
wall seconds, page faults, and the CPU time as a multiple of one copy of the weights. The figures
are those of the round with the least CPU time.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import at_least_one
from benchmarks.update import load_policy
from rollout import LLM
from trainer_hooks import WeightSync

COPY, DISCARDED, IN_FLIGHT = "one copy", "weights discarded", "in flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Costs of a call: CPU seconds, wall seconds and page faults.

    num_faults: minor page faults, which read nothing from a disk.
    """

    cpu_s: float
    wall_s: float
    num_faults: int


def measure(is_small: bool, rounds: int) -> dict[str, Use]:
    """Copy and push the weights `rounds` times, after a warm-up round.

    Returns the least costly use of the copy and of each push, by name.
    """
    policy = load_policy(is_small)
    weights = [parameter.detach() for parameter in policy.parameters()]
    copies = [weight.clone() for weight in weights]
    uses: dict[str, list[Use]] = {COPY: [], DISCARDED: [], IN_FLIGHT: []}
    with LLM(policy, max_sequence_length=256, buffer_size_gb=0.05, num_threads=1) as llm:
        suspended, in_flight = WeightSync(llm), WeightSync(llm, in_flight=True)
        for _ in range(rounds + 1):
            uses[COPY].append(use_of(lambda: torch._foreach_copy_(copies, weights)))
            llm.pause()
            llm.suspend(release=("kv_cache", "weights"), discard_weights=True)
            llm.resume(only="weights")
            uses[DISCARDED].append(use_of(lambda: suspended.push(policy)))
            llm.resume()
            llm.unpause()
            uses[IN_FLIGHT].append(use_of(lambda: in_flight.push(policy)))
    return {name: min(each[1:], key=lambda use: use.cpu_s) for name, each in uses.items()}


def use_of(work: Callable[[], object]) -> Use:
    """Call `work`, and return its costs."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return Use(
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        wall_s=wall_s,
        num_faults=after.ru_minflt - before.ru_minflt,
    )


def main(argv: Sequence[str] | None = None) -> dict[str, Use]:
    """Run the benchmark, print a table, and return the costs by name."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument(
        "--rounds", type=at_least_one, default=8, help="the least CPU time is printed"
    )
    arguments = parser.parse_args(argv)
    uses = measure(arguments.small, arguments.rounds)
    table = Table("push", "CPU s", "wall s", "page faults", "copies")
    for name, use in uses.items():
        table.add_row(
            name, f"{use.cpu_s:.3f}", f"{use.wall_s:.3f}", f"{use.num_faults:,}",
            f"{use.cpu_s / max(uses[COPY].cpu_s, 1e-9):.1f}",
        )  # fmt: skip
    Console().print(table)
    return uses


if __name__ == "__main__":
    restart_with_one_thread()
    main()
