"""CPU time of scheduler operations, by the size of the KV pool or of a prompt.

    python benchmarks/scheduling_growth.py            # a minute
    python benchmarks/scheduling_growth.py --small    # seconds: shows that it runs, not how fast

A program, run by hand. The operations are an abort, a new weights version, and a step while a
request waits for room. No model runs. The program prints a Markdown page with median CPU
microseconds, and writes it and a JSON file.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import dated, publish, results_parser
from benchmarks.scheduling import add_request
from rollout.blocks.kv_cache_manager import BlockTable, KVCacheManager
from rollout.scheduling.scheduler import Scheduler
from rollout.step.output import SampleResult, StepOutput
from rollout.version_spans import VersionSpans

BLOCK = 16
NUM_RUNNING = 8
PROMPT = 512
BLOCKS_PER_PREFIX = 64


class Bench:
    """A scheduler with a pool of `num_blocks` blocks and a prefix index, without a model."""

    def __init__(self, num_blocks: int, *, max_tokens: int = 1 << 30) -> None:
        blocks = KVCacheManager(
            num_blocks=num_blocks,
            block_size=BLOCK,
            num_rows=4096,
            enable_prefix_caching=True,
            keeps_unused=True,
        )
        self.scheduler = Scheduler(
            blocks,
            max_tokens=max_tokens,
            max_paused_blocks=0,
            enable_chunked_prefill=True,
        )
        self._blocks, self.version = blocks, 0
        self._next_id = 0

    def add(self, tokens: list[int], max_new: int) -> int:
        """Queue a request of at most `max_new` new tokens, and return its id."""
        self._next_id += 1
        add_request(self.scheduler, self._next_id, tokens, max_new)
        return self._next_id

    def step(self) -> None:
        """Schedule and commit one step. Every sampled token is 7."""
        plan = self.scheduler.schedule(self.version).plan
        if plan is not None:
            count = len(plan.sample_rows)
            samples = SampleResult(
                token_ids_S=np.full(count, 7), is_finite_S=np.ones(count, dtype=np.bool_)
            )
            self.scheduler.update_from_output(plan, StepOutput(samples=samples))

    def fill_index(self) -> None:
        """Fill the pool with unused blocks that are in the prefix index."""
        blocks, table = self._blocks, BlockTable()
        num_blocks = blocks.num_free_blocks
        for start in range(0, num_blocks, BLOCKS_PER_PREFIX):
            num_tokens = min(BLOCKS_PER_PREFIX, num_blocks - start) * BLOCK
            table.keys = []
            blocks.allocate(table, 0, num_tokens)
            spans = VersionSpans([(num_tokens, self.version)])
            blocks.cache_blocks(table, [start] * num_tokens, spans, self.version)
            blocks.free(table)


def timed(action: Callable[[], object]) -> float:
    """Return the CPU microseconds of a call."""
    start = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - start) / 1e3


class Abort:
    """Abort of a running request with 32 blocks."""

    name = "abort, by blocks in the pool"

    def __init__(self, size: int) -> None:
        self._bench = Bench(size)

    def sample(self) -> float:
        request_id = self._bench.add(list(range(PROMPT)), 100)
        self._bench.step()
        return timed(lambda: self._bench.scheduler.finish_request(request_id))


class AbortBesideFullIndex(Abort):
    """Abort of a running request, while the prefix index fills the pool."""

    name = "abort beside an index that fills the pool, by its blocks"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._bench.fill_index()


class Update:
    """A new weights version, for which a full prefix index has no usable block."""

    name = "new weights version, by blocks in the index"

    def __init__(self, size: int) -> None:
        self._bench = Bench(size)
        self._bench.fill_index()

    def sample(self) -> float:
        self._bench.version += 1
        return timed(self._bench.scheduler.kv_cache_manager.begin_weights_version)


class BlockedHead:
    """A step of running requests while the first waiting request has no room.

    `size` sets the length of the waiting prompt.
    """

    name = "step beside a blocked head, by tokens of its prompt"

    def __init__(self, size: int) -> None:
        num_blocks = (size + PROMPT * NUM_RUNNING * 4) // BLOCK
        self._bench = Bench(num_blocks)
        for _ in range(NUM_RUNNING):
            self._bench.add(list(range(PROMPT)), PROMPT * 2)
        self._bench.step()
        self._bench.add(list(range(size + PROMPT * NUM_RUNNING * 2)), PROMPT)
        self._bench.step()

    def sample(self) -> float:
        return timed(self._bench.step)


class BlockedHeadAsOthersLeave:
    """A step with a waiting request, after one of many short requests was aborted."""

    name = "step beside a blocked head after a request has left, by tokens of its prompt"

    def __init__(self, size: int) -> None:
        num_running = 256
        self._bench = Bench((size + 64 * num_running) // BLOCK)
        self._running = [self._bench.add([7] * BLOCK, 4 * BLOCK) for _ in range(num_running)]
        self._bench.step()
        self._bench.add(list(range(size + 64 * num_running - BLOCK)), BLOCK)
        self._bench.step()

    def sample(self) -> float:
        self._bench.scheduler.finish_request(self._running.pop())
        return timed(self._bench.step)


CASES = (Abort, AbortBesideFullIndex, Update, BlockedHead, BlockedHeadAsOthersLeave)


def measure(sizes: Sequence[int], rounds: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Return the median of each size, by case. Calls `advance` after each case."""
    results: dict[str, Any] = {}
    for case in CASES:
        benches = {size: case(size) for size in sizes}
        samples: dict[int, list[float]] = {size: [] for size in sizes}
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            for size, bench in benches.items():
                samples[size].append(bench.sample())
        gc.enable()
        results[case.name] = [statistics.median(samples[size]) for size in sizes]
        advance()
    return results


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row per case."""
    sizes, machine = results["sizes"], results["machine"]
    lines = [
        f"# Costs as pool and prompts grow, {results['date']}",
        "",
        f"{machine['cpu']}, one thread, Python {machine['python']}. CPU microseconds, medians of "
        f"{results['rounds']} interleaved rounds.",
        "",
        f"| | {' | '.join(f'{size:,}' for size in sizes)} | growth |",
        "|---|" + "---:|" * (len(sizes) + 1),
    ]
    for name, costs in results["costs"].items():
        cells = [f"{cost:.1f}" for cost in costs]
        lines.append(f"| {name} | {' | '.join(cells)} | **{costs[-1] / costs[0]:.2f}** |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print and write the results, and return them."""
    arguments = results_parser(__doc__, rounds=40, small="small pools, few rounds").parse_args(argv)
    sizes = (1_000, 4_000) if arguments.small else (1_000, 10_000, 100_000, 1_000_000)
    rounds = 3 if arguments.small else arguments.rounds
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("costs", total=len(CASES))
        costs = measure(sizes, rounds, lambda: progress.advance(task))
    results = {
        **dated(),
        "rounds": rounds,
        "sizes": list(sizes),
        "costs": costs,
    }
    publish(results, as_markdown(results), "scheduling-growth", arguments.output, console)
    return results


if __name__ == "__main__":
    restart_with_one_thread()
    main()
