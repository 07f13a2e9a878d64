"""Gap between the log-probs of engine and trainer, by the age of the KV, for two kinds of engines.

    python -m benchmarks.kv_age                # an hour on one core; needs SmolLM2 and vLLM
    python -m benchmarks.kv_age --engines rollout --seeds 0 --output a.jsonl
    python -m benchmarks.kv_age --seeds --rows a.jsonl b.jsonl   # runs nothing: table and plot
    python -m benchmarks.kv_age --small        # seconds, with a random model: shows that it runs

A program, run by hand. SmolLM2-135M learns by GRPO. After each update the new weights go to several
engines, which answer the same prompts. All prompts begin with the same system prompt and examples,
so an engine finds their KV in its prefix cache. The engines differ in the greatest age of this KV.

The trainer computes the log-probs of each engine's tokens with the newest weights. For comparison,
the program also computes them with the weights of version 0. It prints a Markdown table, adds rows
to the file of --output, and draws docs/images/kv_age.png.

Shape letters: B rows, T positions, N sampled tokens of a step.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import table_row
from benchmarks.trl_step import policy_of, rewards_of
from rollout import LLM, InferenceConfig
from trainer_hooks import (
    PolicyLossConfig,
    PromptItem,
    RolloutBatch,
    UpdateSettings,
    accumulate_gradients,
    collate_rollouts,
    compute_logprobs,
    group_advantages,
)
from trainer_hooks.train.job import JobSettings, compose_settings
from trainer_hooks.train.learner import optimizer_of
from trainer_hooks.train.task import Task
from trainer_hooks.train.word_tasks import reversed_lists
from trainer_hooks.update.guarded_step import clip_gradients

PLOT = Path(__file__).parents[1] / "docs" / "images" / "kv_age.png"
LOSS = PolicyLossConfig(kind="dapo")
NUM_EXAMPLES = 8  # examples in each prompt
NUM_MEASURED = 2  # samples of each prompt by an engine on whose answers no policy is trained
_REUSE = {"enable_prefix_caching": True, "prefix_reuse_across_versions": True}
# Settings of an engine by the bound on the age of its KV, in versions.
BOUNDS: dict[str, dict[str, Any]] = {
    "0": {"enable_prefix_caching": True},  # prefixes are found by requests of one version alone
    "1": {**_REUSE, "max_kv_staleness_versions": 1},
    "4": {**_REUSE, "max_kv_staleness_versions": 4},
    "none": _REUSE,
}
ENGINES = ("rollout", "vllm")
OLD_WEIGHTS = "old weights"  # the row of tokens that were computed with the weights of version 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The gap of the tokens that one engine sampled at one version.

    engine: one of ENGINES, or OLD_WEIGHTS.
    version: version of the engine's weights.
    age: age in versions of the oldest KV that a token attended to, mean over tokens.
    gap: mean absolute difference of the log-probs, in nats.
    kl: KL(engine || trainer) of the two policies, estimated by k3.
    outside: share of tokens whose probabilities differ by more than 20%.
    worst: largest absolute difference of a log-prob.
    """

    seed: int
    engine: str
    bound: str
    version: int
    age: float
    gap: float
    kl: float
    outside: float
    worst: float


def gap_of(engine_N: torch.Tensor, trainer_N: torch.Tensor, age: float, **of: Any) -> Gap:
    """Return the gap between two log-probs of each token. `of` has the other fields of Gap."""
    difference_N = (engine_N - trainer_N).double()
    return Gap(
        age=age,
        gap=float(difference_N.abs().mean()),
        kl=float((torch.expm1(-difference_N) + difference_N).mean()),
        outside=float(((torch.expm1(difference_N)).abs() > 0.2).double().mean()),
        worst=float(difference_N.abs().max()),
        **of,
    )


def job_of(is_small: bool, seed: int) -> JobSettings:
    """Return the settings of the smollm job, with NUM_EXAMPLES examples in each prompt."""
    small = ("algorithm.groups_per_step=2", "algorithm.group_size=2", "algorithm.max_new_tokens=3")
    settings = compose_settings((f"seed={seed}", *(small if is_small else ())), "smollm")
    rows = random.Random(0).sample(list(reversed_lists("warmup", 0)), NUM_EXAMPLES)
    examples = {str(row.prompt): row.columns["answer"] for row in rows}
    return replace(settings, data=replace(settings.data, examples=examples))


def update_of(settings: JobSettings) -> UpdateSettings:
    """Return the job's settings for forward passes, with little memory."""
    return replace(settings.algorithm.update_settings, gradient_checkpointing=True)


def engine_of(name: str, bound: str, policy: Any, task: Task, directory: Path) -> LLM:
    """Return an engine with the policy's weights, which are also saved in `directory`."""
    common: dict[str, Any] = {"block_size_tokens": 32, "max_sequence_length": 512, "seed": 0}
    common |= {"max_requests": 64, "num_threads": 1, "dtype": "float32", "device": "cpu"}
    common |= {"buffer_size_gb": 0.5, **BOUNDS[bound]}
    if name == "rollout":  # vLLM keeps prefixes that no request uses, by itself
        common["prefix_caching_eviction_policy"] = "lru"
    model = directory if name == "vllm" else policy
    return LLM(model, task.tokenizer, InferenceConfig(engine=name, **common))


def oldest_ages(requests: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the age of the oldest KV in the context of each sampled token, [N].

    The age is in versions behind the weights that sampled the token.
    """
    return np.concatenate(
        [
            np.asarray(each.policy_versions) - np.asarray(each.context_kv_version_min)
            for each in requests
        ]
    )


def train(
    seed: int, num_steps: int, engines: Sequence[str], bounds: Sequence[str], is_small: bool
) -> Iterator[Gap]:
    """Train one policy on the first engine's answers. Yield each engine's gap at each version."""
    settings = job_of(is_small, seed)
    task = Task(settings.model, settings.data, settings.reward)
    policy, sizes = policy_of(task, is_small), settings.algorithm
    first = deepcopy(policy).requires_grad_(False)
    optimizer = optimizer_of([{"params": [*policy.parameters()], "lr": 1e-5}], settings.trainer)
    update = update_of(settings)
    params, rows = sizes.sampling_params(), task.prompts(seed)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="kv-age-")))
        policy.save_pretrained(directory)
        llms = {
            (name, bound): stack.enter_context(engine_of(name, bound, policy, task, directory))
            for name in engines
            for bound in bounds
        }
        counts = [sizes.group_size] + [min(NUM_MEASURED, sizes.group_size)] * (len(llms) - 1)
        for version in range(num_steps):
            start = version * sizes.groups_per_step
            items = [rows[start + place] for place in range(sizes.groups_per_step)]
            sampled = {
                key: sampled_by(llm, task, items, params, count, is_small)
                for key, llm, count in zip(llms, llms.values(), counts, strict=True)
            }
            requests = [each for own, _ in sampled.values() for each in own]
            rewards = [each for _, own in sampled.values() for each in own]
            # All rows begin with the same examples, so one batch of all computes these once.
            batch = collate_rollouts(requests, rewards, train_version=version)
            trainer_BT = compute_logprobs(policy, batch, update)
            of: dict[str, Any] = {"seed": seed, "version": version}
            begin = 0
            for (name, bound), (own, _) in sampled.items():
                rows_B = slice(begin, begin + len(own))
                mask_BT, begin = batch.mask_BT[rows_B], begin + len(own)
                engine_N = batch.behaviour_logprobs_BT[rows_B][mask_BT]
                trainer_N = trainer_BT[rows_B][mask_BT]
                age = float(oldest_ages(own).mean())
                yield gap_of(engine_N, trainer_N, age, engine=name, bound=bound, **of)
            (_, bound), (own, own_rewards) = next(iter(sampled.items()))
            train_batch = collate_rollouts(own, own_rewards, train_version=version)
            mask_BT = train_batch.mask_BT
            old_N = compute_logprobs(first, train_batch, update)[mask_BT]
            trainer_N = trainer_BT[: len(own), : mask_BT.shape[1]][mask_BT]
            yield gap_of(old_N, trainer_N, version, engine=OLD_WEIGHTS, bound=bound, **of)
            step(policy, optimizer, train_batch, sizes.group_size, settings)
            for llm in llms.values():
                llm.update_weights(policy, version + 1, in_flight=True)


def sampled_by(
    llm: LLM, task: Task, items: Sequence[PromptItem], params: Any, count: int, is_small: bool
) -> tuple[list[Any], list[float]]:
    """Return an engine's answers, `count` to each prompt, and their rewards."""
    requests: Any = llm.generate([item.prompt for item in items], params, n=count)
    answers = [item.columns["answer"] for item in items for _ in range(count)]
    completions = [each.generated_tokens for each in requests]
    return requests, rewards_of(task, completions, answers, is_small)


def step(
    policy: Any, optimizer: Any, batch: RolloutBatch, group_size: int, settings: JobSettings
) -> None:
    """Update the policy on a batch of groups."""
    advantages_B = group_advantages(batch.rewards_R.view(-1, group_size)).flatten()
    columns = {"advantages_BT": advantages_B[:, None].expand(batch.tokens_BT.shape)}
    accumulate_gradients(policy, batch, columns, LOSS, update_of(settings))
    clip_gradients(policy, settings.trainer.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


# ---- table and plot


def table(gaps: Sequence[Gap]) -> str:
    """Return a Markdown table with a row for each engine and bound.

    The figures are of the second half of all runs: means, and as `worst` the maximum.
    """
    last = max(gap.version for gap in gaps)
    rows: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in gaps:
        if gap.version > last / 2:
            rows[gap.engine, gap.bound].append(gap)
    lines = [
        "| engine | bound, versions | mean age | mean gap, nats | tokens beyond 20% | worst |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (engine, bound), own in rows.items():
        bound = "" if engine == OLD_WEIGHTS else bound
        cells = [engine, bound, f"{fmean(gap.age for gap in own):.1f}"]
        cells += [f"{fmean(gap.gap for gap in own):.2g}"]
        cells += [f"{fmean(gap.outside for gap in own):.1%}"]
        lines.append(table_row([*cells, f"{max(gap.worst for gap in own):.2g}"]))
    return "\n".join(lines)


def draw(gaps: Sequence[Gap], path: Path) -> None:
    """Draw the mean gap over the versions of the weights.

    Each engine has a panel, and each bound a line, with a band from the lowest to the highest seed.
    """
    from matplotlib.figure import Figure

    engines = [name for name in ENGINES if any(gap.engine == name for gap in gaps)]
    figure = Figure(figsize=(4.6 * len(engines), 3.4), layout="constrained")
    panels = figure.subplots(1, len(engines), sharey=True, squeeze=False)[0]
    for axes, engine in zip(panels, engines, strict=True):
        lines = [(OLD_WEIGHTS, bound) for bound in BOUNDS] + [(engine, b) for b in BOUNDS]
        for name, bound in lines:
            by_version: dict[int, list[float]] = defaultdict(list)
            for gap in gaps:
                if (gap.engine, gap.bound) == (name, bound) and gap.version:
                    by_version[gap.version].append(gap.gap)
            if not by_version:
                continue
            versions, values = zip(*sorted(by_version.items()), strict=True)
            is_old = name == OLD_WEIGHTS
            of_kv = "KV: no bound" if bound == "none" else f"KV: bound {bound}"
            label = "weights of version 0" if is_old else of_kv
            style = {"color": "gray", "linestyle": "--"} if is_old else {}
            (line,) = axes.plot(versions, [fmean(v) for v in values], label=label, **style)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(versions, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        axes.set(title=f'engine="{engine}"', xlabel="updates", yscale="log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean gap of log-probs, nats")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="rows of earlier runs")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--bounds", nargs="+", choices=BOUNDS, default=list(BOUNDS))
    parser.add_argument("--small", action="store_true", help="a random model, three steps")
    parser.add_argument("--output", type=Path, default=Path("kv_age.jsonl"), help="rows as JSON")
    parser.add_argument("--plot", type=Path, default=PLOT)
    given = parser.parse_args(argv)
    gaps = [Gap(**json.loads(line)) for path in given.rows for line in path.open()]
    num_steps = 3 if given.small else given.steps
    with given.output.open("a") as output:
        for seed in given.seeds:
            for gap in train(seed, num_steps, given.engines, given.bounds, given.small):
                gaps.append(gap)
                output.write(json.dumps(asdict(gap)) + "\n")
                output.flush()
    print(f"{describe(InferenceConfig(num_threads=1))}\n\n{table(gaps)}")
    draw(gaps, given.plot)


if __name__ == "__main__":
    restart_with_one_thread()
    main()
