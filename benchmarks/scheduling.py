"""Compare the scheduler with an oracle when KV blocks run out, in number of steps.

    python benchmarks/scheduling.py            # a minute
    python benchmarks/scheduling.py --small    # seconds: shows that it runs, not how well

A program, run by hand. `benchmarks.scheduling_growth` imports `add_request`. No model runs and
nothing is timed, so the figures are equal on every machine. The length of every output is drawn in
advance. The oracle knows all lengths, and the scheduler sees only end tokens. The program prints a
Markdown page, and writes it and a JSON file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from benchmarks.pages import dated, publish, results_parser
from rollout import SamplingParams
from rollout.blocks.kv_cache_manager import KVCacheManager
from rollout.scheduling.scheduler import Scheduler
from rollout.scheduling.stopping import StopRule
from rollout.step.output import SampleResult, StepOutput
from rollout.step.plan import StepPlan

POOL_FRACTIONS = (0.25, 0.5, 0.75)
MAX_TOKENS = 16384
TOKEN, END = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that arrive at the same time.

    num_prompt: prompt tokens of each request.
    max_new: limit of new tokens, which the scheduler knows.
    lengths: number of tokens that each request generates.
    """

    name: str
    num_prompt: int
    max_new: int
    lengths: tuple[int, ...]
    block_size: int = 16

    @property
    def needed_blocks(self) -> int:
        """Number of blocks that all requests hold together, each at its end."""
        return sum(blocks_of(self, length) for length in self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one simulated run.

    pool_fraction: blocks of the pool over `Workload.needed_blocks`.
    oracle_steps: result of the function `oracle_steps`.
    mean_batch: mean number of requests that get a token in a step.
    num_recomputed: tokens that were computed again after an eviction.
    """

    workload: str
    pool_fraction: float
    num_blocks: int
    steps: int
    oracle_steps: int
    mean_batch: float
    num_generated: int
    num_recomputed: int
    num_evictions: int

    @property
    def steps_over_oracle(self) -> float:
        """Number of steps over the oracle's number."""
        return self.steps / self.oracle_steps

    @property
    def recomputed_fraction(self) -> float:
        """Recomputed tokens as a fraction of the generated tokens."""
        return self.num_recomputed / self.num_generated


def workloads(num_requests: int) -> list[Workload]:
    """Return four workloads, with equal, uniform and lognormal lengths."""
    draw = np.random.default_rng(0)
    uniform = draw.integers(1, 513, num_requests)
    lognormal = np.exp(draw.normal(np.log(150), 0.8, num_requests)).astype(int).clip(1, 512)
    long_tail = np.exp(draw.normal(np.log(300), 0.7, num_requests)).astype(int).clip(1, 4096)
    cases: list[tuple[str, int, Sequence[int]]] = [
        ("all 512", 512, [512] * num_requests),
        ("uniform to 512", 512, uniform.tolist()),
        ("lognormal, median 150, limit 512", 512, lognormal.tolist()),
        ("lognormal, median 300, limit 4096", 4096, long_tail.tolist()),
    ]
    return [
        Workload(name=name, num_prompt=32, max_new=max_new, lengths=tuple(lengths))
        for name, max_new, lengths in cases
    ]


def blocks_of(workload: Workload, num_new: int) -> int:
    """Return the blocks of a request with `num_new` new tokens. The last token has no KV."""
    return -(-(workload.num_prompt + num_new - 1) // workload.block_size)


def simulate(workload: Workload, num_blocks: int) -> tuple[int, list[StepPlan], int]:
    """Run the scheduler to the end.

    Returns the number of steps, their plans, and the number of evictions.
    """
    num_requests = len(workload.lengths)
    scheduler = Scheduler(
        KVCacheManager(
            num_blocks=num_blocks, block_size=workload.block_size, num_rows=num_requests
        ),
        max_tokens=MAX_TOKENS,
        max_paused_blocks=0,
        enable_chunked_prefill=True,
    )
    for request in range(num_requests):
        prompt, max_new = [TOKEN] * workload.num_prompt, workload.max_new
        add_request(scheduler, request, prompt, max_new, end_ids=(END,))
    ends = EndOfEach(workload)
    plans, num_evictions = [], 0
    while not scheduler.is_idle:
        schedule = scheduler.schedule(0)
        assert schedule.plan is not None
        num_evictions += len(schedule.preempted)
        scheduler.update_from_output(schedule.plan, ends.output(schedule.plan))
        plans.append(schedule.plan)
    return len(plans), plans, num_evictions


def add_request(
    scheduler: Scheduler,
    request_id: int,
    prompt: list[int],
    max_new: int,
    end_ids: tuple[int, ...] = (),
) -> None:
    """Queue a request of at most `max_new` new tokens, with `request_id` as its seed."""
    scheduler.add_request(
        request_id,
        prompt,
        num_prompt=len(prompt),
        priority=0,
        group_id=None,
        sampling_params=SamplingParams(),
        seed=request_id,
        stop_rule=StopRule(end_ids=end_ids, stop_words=(), max_length=len(prompt) + max_new),
        wants_prompt_logprobs=False,
    )


class EndOfEach:
    """Fake model that samples END at each request's drawn length, and TOKEN before."""

    def __init__(self, workload: Workload) -> None:
        lengths = np.array(workload.lengths, dtype=np.int64)
        self._last_positions = workload.num_prompt + lengths - 1
        self._last_position_of_row = np.zeros(len(lengths) + 1, dtype=np.int64)

    def output(self, plan: StepPlan) -> StepOutput:
        for new in plan.new_rows:
            self._last_position_of_row[new.row] = self._last_positions[new.seed]
        is_last = plan.sample_positions >= self._last_position_of_row[plan.sample_rows]
        samples = SampleResult(
            token_ids_S=np.where(is_last, END, TOKEN),
            is_finite_S=np.ones(len(is_last), dtype=np.bool_),
        )
        return StepOutput(samples=samples)


def oracle_steps(workload: Workload, num_blocks: int) -> int:
    """Return the number of steps of an oracle that knows every length.

    The oracle starts requests in order of arrival. A request starts once all blocks that it will
    ever need fit beside the running requests' blocks, so the oracle never evicts.
    """
    longest = max(workload.lengths)
    used = np.zeros(longest + 1, dtype=np.int64)  # blocks in each step from now on
    waiting = [_blocks_by_step(workload, length) for length in reversed(workload.lengths)]
    steps = last_end = 0
    while waiting:
        while waiting and (used[: len(waiting[-1])] + waiting[-1] <= num_blocks).all():
            future = waiting.pop()
            used[: len(future)] += future
            last_end = max(last_end, steps + len(future))
        used = np.append(used[1:], 0)
        steps += 1
    return last_end


def _blocks_by_step(workload: Workload, length: int) -> NDArray[np.int64]:
    """Return the number of blocks that a request holds in each of its steps."""
    positions = workload.num_prompt + np.arange(length)
    return -(-positions // workload.block_size)


def measure(
    cases: Sequence[Workload], fractions: Sequence[float], advance: Callable[[], None]
) -> list[Outcome]:
    """Simulate every workload with every pool size. Calls `advance` after each run."""
    outcomes = []
    for workload in cases:
        for fraction in fractions:
            num_blocks = int(fraction * workload.needed_blocks)
            steps, plans, num_evictions = simulate(workload, num_blocks)
            num_computed = sum(plan.num_tokens for plan in plans)
            num_generated = sum(workload.lengths)
            num_once = len(workload.lengths) * (workload.num_prompt - 1) + num_generated
            outcome = Outcome(
                workload=workload.name,
                pool_fraction=fraction,
                num_blocks=num_blocks,
                steps=steps,
                oracle_steps=oracle_steps(workload, num_blocks),
                mean_batch=sum(len(plan.sample_rows) for plan in plans) / steps,
                num_generated=num_generated,
                num_recomputed=num_computed - num_once,
                num_evictions=num_evictions,
            )
            outcomes.append(outcome)
            advance()
    return outcomes


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row per workload and pool size."""
    lines = [
        f"# Scheduling when KV blocks run out, {results['date']}",
        "",
        f"{results['num_requests']} requests arrive together, prompts of 32 tokens, blocks of 16. "
        "The pool is a fraction of what all of them need at their ends. The oracle knows every "
        "length, starts each request as soon as all of its future fits, and never evicts. "
        "Recomputed: tokens computed more than once, as a fraction of those generated.",
        "",
        "| output lengths | pool | steps | oracle | ratio | mean batch | recomputed | evictions |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for outcome in (Outcome(**values) for values in results["outcomes"]):
        lines.append(
            f"| {outcome.workload} | {outcome.pool_fraction:.0%} | {outcome.steps:,} "
            f"| {outcome.oracle_steps:,} | **{outcome.steps_over_oracle:.2f}** "
            f"| {outcome.mean_batch:.0f} | **{outcome.recomputed_fraction:.1%}** "
            f"| {outcome.num_evictions:,} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate all cases, print and write the results, and return them."""
    parser = results_parser(__doc__, small="few requests")
    parser.add_argument("--requests", type=int, default=256, help="requests of each workload")
    arguments = parser.parse_args(argv)
    num_requests = 16 if arguments.small else arguments.requests
    console = Console(stderr=True)
    cases = workloads(num_requests)
    with Progress(console=console) as progress:
        task = progress.add_task("simulated runs", total=len(cases) * len(POOL_FRACTIONS))
        outcomes = measure(cases, POOL_FRACTIONS, lambda: progress.advance(task))
    results = {
        **dated(),
        "num_requests": num_requests,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    publish(results, as_markdown(results), "scheduling", arguments.output, console)
    return results


if __name__ == "__main__":
    main()
