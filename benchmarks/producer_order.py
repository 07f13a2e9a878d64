"""Time that a trainer waits for rollouts of varied length, by the producer's order.

    python benchmarks/producer_order.py            # five minutes
    python benchmarks/producer_order.py --small    # seconds: shows that it runs, not how well

A program, run by hand. It compares the orders "admission" and "ready" of AsyncRolloutProducer.
Engine and trainer are simulated in virtual time, so the figures are equal on every machine. Lengths
of rollouts are lognormal, a token takes one second, and longer rollouts have lower rewards. The
program prints a Markdown page, and writes it and a JSON file.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.pages import dated, publish, results_parser
from benchmarks.virtual_time import run_virtually
from rollout.requests import DynamicInferenceRequest, Status
from rollout.sampling_params import SamplingParams
from rollout.step.seeds import mix_seed
from trainer_hooks import AsyncRolloutProducer, TrainingBatch
from trainer_hooks.producer.producer import Order

MEDIAN_TOKENS = 8
GROUP_SIZE = 8
WARM_BATCHES = 6  # at either end, left out of the idle share: at the end too few prompts are left


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings of one simulated run.

    order: order of the producer, "admission" or "ready".
    bound: staleness bound of the producer, in weight versions.
    sigma: standard deviation of a rollout's log-length.
    oversample: groups that are begun in addition, as a share of the groups of a batch.
    trainer_share: duration of a training step, in rollouts of mean length.
    prompt_share: share of the log-length's variance that depends only on the prompt.
    """

    order: Order
    bound: int
    sigma: float
    oversample: float = 0.0
    trainer_share: float = 2.5
    prompt_share: float = 0.0

    @property
    def mean_tokens(self) -> float:
        """Mean length of a rollout, in tokens and in seconds."""
        return MEDIAN_TOKENS * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of one simulated run.

    idle_share: share of its time that the trainer waits.
    largest_lag: largest policy lag of trained tokens, in weight versions.
    prompts_per_epoch: share of the prompts that were trained on.
    reissued_share: share of the trained groups that were sampled more than once.
    most_reissues: largest number of times that a group was sampled again.
    extra_tokens: tokens sampled and not trained on, relative to those trained on.
    trained_length, trained_reward: means over the samples trained on.
    drawn_length, drawn_reward: means over the first samples of each trained prompt.
    """

    case: Case
    idle_share: float
    largest_lag: int
    prompts_per_epoch: float
    reissued_share: float
    most_reissues: int
    extra_tokens: float
    trained_length: float
    drawn_length: float
    trained_reward: float
    drawn_reward: float


@dataclass
class LongTailLLM:
    """Fake AsyncLLM that samples one token per second for each request, in virtual time.

    num_tokens: tokens sampled so far, including those of aborted requests.
    """

    case: Case
    weights_version: int = 0
    num_tokens: int = 0
    _push_times_s: list[float] = field(default_factory=list)

    async def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, n: int = 1
    ) -> list[DynamicInferenceRequest]:
        """Return `n` samples of a prompt, once all samples are complete."""
        params = sampling_params or SamplingParams()
        works = (self._sample(prompts, params, mix_seed(params.seed or 0, 0, i)) for i in range(n))
        return list(await asyncio.gather(*works))

    def length(self, prompt: Sequence[int], seed: int) -> int:
        """Return the length of a sample, which depends only on the prompt and the seed."""
        of_prompt = np.random.default_rng(prompt[0]).normal() * self.case.prompt_share**0.5
        of_sample = np.random.default_rng(seed).normal() * (1.0 - self.case.prompt_share) ** 0.5
        return max(1, round(MEDIAN_TOKENS * math.exp(self.case.sigma * (of_prompt + of_sample))))

    async def _sample(
        self, prompt: Sequence[int], params: SamplingParams, seed: int
    ) -> DynamicInferenceRequest:
        loop = asyncio.get_running_loop()
        start_s, length = loop.time(), self.length(prompt, seed)
        try:
            await asyncio.sleep(length)
        finally:
            self.num_tokens += round(loop.time() - start_s)
        versions = [self._version_at(start_s + second) for second in range(length)]
        request = DynamicInferenceRequest(
            request_id=0,
            prompt_tokens=torch.tensor(prompt),
            generated_tokens=[0] * length,
            generated_log_probs=torch.zeros(length),
            sampling_params=params,
            status=Status.COMPLETED,
            weights_version=versions[0],
            context_kv_version_mean=[float(version) for version in versions],
        )
        request.kv_spans.append(len(prompt), versions[0])
        for version in versions:
            request.policy_spans.append(1, version)
            request.kv_spans.append(1, version)
        request.freeze_versions(self.weights_version)
        return request

    def _version_at(self, time_s: float) -> int:
        return bisect_right(self._push_times_s, time_s)

    def push(self) -> None:
        """Increase the served weights version by 1."""
        self._push_times_s.append(asyncio.get_running_loop().time())
        self.weights_version += 1


def reward_of(length: int, sigma: float) -> float:
    """Return the reward of a length, in [0, 1].

    The reward is 0.5 at the median length. It falls by 0.25 for each `sigma` of the log-length.
    """
    deviations = math.log(length / MEDIAN_TOKENS) / sigma
    return min(1.0, max(0.0, 0.5 - 0.25 * deviations))


async def train(case: Case, batch_groups: int, num_batches: int) -> Outcome:
    """Simulate a training of two epochs, and return its figures."""
    llm = LongTailLLM(case)

    async def reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [reward_of(len(ids), case.sigma) for ids in completion_ids]

    num_prompts = batch_groups * num_batches // 2
    producer = AsyncRolloutProducer(
        llm,
        [[index] for index in range(num_prompts)],
        reward,
        GROUP_SIZE,
        batch_groups,
        case.bound,
        num_epochs=2,
        order=case.order,
        oversample_groups=round(case.oversample * batch_groups),
    )
    batches: list[TrainingBatch] = []
    async with producer:
        async for batch in producer:
            batches.append(batch)
            await asyncio.sleep(case.trainer_share * case.mean_tokens)
            llm.push()
    return summarise(case, llm, batches, num_prompts)


def summarise(
    case: Case, llm: LongTailLLM, batches: Sequence[TrainingBatch], num_prompts: int
) -> Outcome:
    """Return the figures of a run.

    The idle share leaves out the first and the last WARM_BATCHES batches.
    """
    timed = batches[WARM_BATCHES:-WARM_BATCHES] or batches
    waited_s = sum(batch.metrics["timing_s/batch_wait"] for batch in timed)
    trained_s = len(timed) * case.trainer_share * case.mean_tokens
    groups = [group for batch in batches for group in batch.groups]
    lengths = [request.num_generated_tokens for group in groups for request in group.requests]
    first = [
        llm.length([group.ticket.index], mix_seed(mix_seed(0, *_place(group), 0), 0, sample))
        for group in groups
        for sample in range(GROUP_SIZE)
    ]
    return Outcome(
        case=case,
        idle_share=waited_s / (waited_s + trained_s),
        largest_lag=max(int(batch.rollouts.policy_lag_BT.max()) for batch in batches),
        prompts_per_epoch=len({_place(group) for group in groups}) / (2 * num_prompts),
        reissued_share=float(np.mean([group.num_reissues > 0 for group in groups])),
        most_reissues=max(group.num_reissues for group in groups),
        extra_tokens=llm.num_tokens / sum(lengths) - 1.0,
        trained_length=float(np.mean(lengths)),
        drawn_length=float(np.mean(first)),
        trained_reward=float(np.mean([reward_of(length, case.sigma) for length in lengths])),
        drawn_reward=float(np.mean([reward_of(length, case.sigma) for length in first])),
    )


def _place(group: Any) -> tuple[int, int]:
    """Return the epoch and the position of the group's prompt."""
    return group.ticket.epoch, group.ticket.position


def cases() -> list[Case]:
    """Return the cases: both orders at several spreads and bounds, without and with
    prompt_share."""
    orders: list[tuple[Order, int, float]] = [
        ("admission", 1, 0.0),
        ("admission", 2, 0.0),
        ("admission", 4, 0.0),
        ("ready", 1, 0.0),
        ("ready", 1, 0.25),
        ("ready", 1, 0.5),
        ("ready", 2, 0.0),
    ]
    independent = [
        Case(order=order, bound=bound, sigma=sigma, oversample=oversample)
        for sigma in (0.5, 1.0, 1.5)
        for order, bound, oversample in orders
    ]
    decided = [
        Case(order=order, bound=bound, sigma=1.0, oversample=oversample, prompt_share=0.5)
        for order, bound, oversample in [*orders, ("ready", 4, 0.0)]
    ]
    return independent + decided


def as_markdown(results: dict[str, Any]) -> str:
    """Return a Markdown page with a row per case."""
    lines = [
        f"# Orders of the producer, {results['date']}",
        "",
        f"Virtual time, so the same on every machine. Groups of {GROUP_SIZE}, batches of "
        f"{results['batch_groups']} groups, {results['num_batches']} batches over two epochs; "
        "lognormal lengths, of which prompts decide a share of the variance; a training step takes "
        "2.5 times a rollout of mean length. Oversample: groups begun beside each batch. Idle: the "
        "share of its time that the trainer waits. Extra tokens: sampled and not trained on, "
        "relative to those trained on. Length and reward: means over the samples trained on / over "
        "those drawn first for each prompt, which is what the policy does.",
        "",
        "| sigma | by prompt | order | S | oversample | idle | largest lag | prompts trained "
        "| issued again | most often | extra tokens | length | reward |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for values in results["outcomes"]:
        case, idle = values["case"], values["idle_share"]
        lines.append(
            f"| {case['sigma']} | {case['prompt_share']:.0%} | {case['order']} | {case['bound']} "
            f"| {case['oversample']:.0%} | **{idle:.1%}** | {values['largest_lag']} "
            f"| {values['prompts_per_epoch']:.0%} | {values['reissued_share']:.0%} "
            f"| {values['most_reissues']} | {values['extra_tokens']:.0%} "
            f"| {values['trained_length']:.1f} / {values['drawn_length']:.1f} "
            f"| {values['trained_reward']:.3f} / {values['drawn_reward']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate all cases, print and write the results, and return them."""
    parser = results_parser(__doc__, small="few batches of few cases")
    parser.add_argument("--batches", type=int, default=40, help="batches of each case")
    parser.add_argument("--groups", type=int, default=8, help="groups of a batch")
    arguments = parser.parse_args(argv)
    chosen = cases()[:4:3] if arguments.small else cases()
    num_batches = 4 if arguments.small else arguments.batches
    batch_groups = 2 if arguments.small else arguments.groups
    console = Console(stderr=True)
    outcomes = []
    with Progress(console=console) as progress:
        for case in progress.track(chosen, description="simulated runs"):
            outcomes.append(run_virtually(train(case, batch_groups, num_batches)))
    results = {
        **dated(),
        "batch_groups": batch_groups,
        "num_batches": num_batches,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    publish(results, as_markdown(results), "producer-order", arguments.output, console)
    return results


if __name__ == "__main__":
    main()
