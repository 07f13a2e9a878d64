"""Time of a routing decision, by the number of blocks that the coordinator knows.

    python benchmarks/routing.py            # half a minute
    python benchmarks/routing.py --small    # seconds: shows that it runs, not how fast

A program, run by hand. Also used by `benchmarks.coordinator`. A decision is `choose` and `assigned`
of a RoutingPolicy, for a prompt of 32 blocks. The policy knows a thousand to a million blocks. The
prompt's blocks are all known, or all new. New blocks displace as many known blocks. The program
prints a Markdown page, and writes it and a JSON file.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, publish, results_parser, table_row
from rollout import PrefixCachingCoordinatorPolicy
from rollout.coordinator.routing.policies import RoutingPolicy, make_policy
from rollout.requests.block_hash import HASH_PRIME

BLOCKS_PER_PROMPT = 32
NUM_TOKENS = 8192
POLICIES = tuple(policy.value for policy in PrefixCachingCoordinatorPolicy)
PROMPT_KINDS = ("known", "new")
DECISIONS_PER_ROUND = 50
WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Nanoseconds of a decision in one case: medians, and the 99th percentile.

    Each figure includes one reading of the clock.
    """

    policy: str
    num_ranks: int
    prompt_kind: str
    num_known_blocks: int
    choose_ns: float
    assigned_ns: float
    decision_ns: float
    decision_p99_ns: float


class Table:
    """A routing policy whose table is full with the blocks of `num_prompts` prompts."""

    def __init__(self, policy: str, num_ranks: int, num_prompts: int) -> None:
        rows = {
            "longest_prefix": num_prompts * BLOCKS_PER_PROMPT,
            "load_balanced": num_prompts * BLOCKS_PER_PROMPT,
            "first_prefix_block": num_prompts,
        }
        options = {"max_rows": rows[policy]} if policy in rows else {}
        self.num_prompts = num_prompts
        self.policy: RoutingPolicy = make_policy(policy, **options)
        self._draw = random.Random(num_prompts)
        self._num_new = 0
        self.ranks = dict.fromkeys(range(num_ranks)).keys()  # all have room
        for rank in self.ranks:
            self.policy.rank_joined(rank)
        for number in range(num_prompts):
            rank = number % num_ranks
            self.policy.assigned(rank, hashes_of(number), NUM_TOKENS)
            self.policy.finished(rank, NUM_TOKENS)

    def decide(self, prompt_kind: str) -> tuple[int, int]:
        """Make one decision. `prompt_kind` is "known" or "new".

        Returns the nanoseconds of `choose` and of `assigned`.
        """
        if prompt_kind == "known":
            hashes = hashes_of(self._draw.randrange(self.num_prompts))
        else:
            hashes = hashes_of(self.num_prompts + self._num_new)
            self._num_new += 1
        start = time.perf_counter_ns()
        rank = self.policy.choose(hashes, self.ranks, NUM_TOKENS)
        middle = time.perf_counter_ns()
        self.policy.assigned(rank, hashes, NUM_TOKENS)
        end = time.perf_counter_ns()
        self.policy.finished(rank, NUM_TOKENS)
        return middle - start, end - middle


def hashes_of(prompt: int) -> list[int]:
    """Return pseudo-random hashes of a prompt's blocks, as new objects for each call."""
    first = prompt * BLOCKS_PER_PROMPT
    # splitmix64
    x = np.arange(first + 1, first + 1 + BLOCKS_PER_PROMPT, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: list[int] = ((x ^ (x >> np.uint64(31))) % np.uint64(HASH_PRIME) + np.uint64(1)).tolist()
    return hashes


def measure_costs(
    policy: str, num_ranks: int, sizes: Sequence[int], rounds: int, advance: Callable[[], None]
) -> Iterator[Cost]:
    """Yield the costs of one policy and number of ranks, at all sizes.

    Calls `advance` after each kind of prompt.
    """
    tables = {size: Table(policy, num_ranks, size // BLOCKS_PER_PROMPT) for size in sizes}
    for prompt_kind in PROMPT_KINDS:
        samples: dict[int, list[tuple[int, int]]] = {size: [] for size in sizes}
        for index in range(WARM_UP_ROUNDS + rounds):
            for size, table in tables.items():
                decisions = [table.decide(prompt_kind) for _ in range(DECISIONS_PER_ROUND)]
                if index >= WARM_UP_ROUNDS:
                    samples[size] += decisions
        advance()
        for size in sizes:
            totals = [sum(sample) for sample in samples[size]]
            yield Cost(
                policy=policy,
                num_ranks=num_ranks,
                prompt_kind=prompt_kind,
                num_known_blocks=size,
                choose_ns=statistics.median(choose for choose, _ in samples[size]),
                assigned_ns=statistics.median(assigned for _, assigned in samples[size]),
                decision_ns=statistics.median(totals),
                decision_p99_ns=statistics.quantiles(totals, n=100)[98],
            )


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all policies, and return all figures as plain values."""
    costs: list[Cost] = []
    with Progress(console=console) as progress:
        num_steps = len(POLICIES) * len(arguments.ranks) * len(PROMPT_KINDS)
        task = progress.add_task("routing decisions", total=num_steps)
        for policy in POLICIES:
            for num_ranks in arguments.ranks:
                costs += measure_costs(
                    policy,
                    num_ranks,
                    arguments.sizes,
                    arguments.rounds,
                    lambda: progress.advance(task),
                )
    return {
        **dated(),
        "blocks_per_prompt": BLOCKS_PER_PROMPT,
        "decisions": arguments.rounds * DECISIONS_PER_ROUND,
        "sizes": list(arguments.sizes),
        "costs": [asdict(cost) for cost in costs],
        "largest_growth": max(growths(costs).values()),
    }


def growths(costs: Sequence[Cost]) -> dict[tuple[str, int, str], float]:
    """Return the time at the largest size over the time at the smallest size.

    The keys are policy, number of ranks and kind of prompt.
    """
    by_case: dict[tuple[str, int, str], list[Cost]] = {}
    for cost in costs:
        by_case.setdefault((cost.policy, cost.num_ranks, cost.prompt_kind), []).append(cost)
    return {case: row[-1].decision_ns / row[0].decision_ns for case, row in by_case.items()}


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row per policy, number of ranks and kind of prompt."""
    machine, sizes = results["machine"], results["sizes"]
    costs = [Cost(**cost) for cost in results["costs"]]
    lines = [
        f"# Routing decisions, {results['date']}",
        "",
        f"{machine['cpu']}, one thread, Python {machine['python']}. Microseconds of choose and "
        f"assigned together for a prompt of {results['blocks_per_prompt']} blocks, by the number "
        f"of blocks known before: median of {results['decisions']} interleaved decisions (99th "
        "percentile).",
        "",
        f"| policy | ranks | prompt | {' | '.join(f'{size:,}' for size in sizes)} | growth |",
        "|---|---:|---|" + "---:|" * (len(sizes) + 1),
    ]
    for case, growth in growths(costs).items():
        cells = [
            f"{cost.decision_ns / 1e3:.2f} ({cost.decision_p99_ns / 1e3:.1f})"
            for cost in costs
            if (cost.policy, cost.num_ranks, cost.prompt_kind) == case
        ]
        policy, num_ranks, prompt_kind = case
        named = [policy, str(num_ranks), prompt_kind, *cells, f"**{growth:.2f}**"]
        lines.append(table_row(named))
    lines += ["", f"Largest growth {results['largest_growth']:.2f}."]
    return "\n".join(lines) + "\n"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = results_parser(__doc__, rounds=40, small="small tables, few rounds")
    arguments = parser.parse_args(argv)
    arguments.sizes, arguments.ranks = (1_000, 10_000, 100_000, 1_000_000), (1, 4, 64)
    if arguments.small:
        arguments.rounds, arguments.sizes, arguments.ranks = 2, (1_000, 4_000), (1, 4)
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    arguments = parse_arguments(argv)
    console = Console(stderr=True)
    results = measure(arguments, console)
    publish(results, as_markdown(results), "routing", arguments.output, console)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
