"""TRL's own GRPOTrainer on the demo task, with rollouts from this engine.

    python examples/train_trl.py [--steps 60] [--compare 6]

TRL computes loss and optimizer steps, and corrects by the ratio of its log-probs to those of the
engine, which differ by rounding only. It prints how the reward rose, the largest difference of a
log-prob, and the CPU time of a step against that with TRL's built-in generation, in the same run.
Needs trl: pip install 'rollout-engine[trl,demo]'.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from hydra import compose, initialize_config_module

from examples.palindromes import PalindromeTask, build_policy, build_tokenizer, warm_up
from examples.settings import JobSettings
from examples.train_grpo import sampling_params
from rollout import LLM, ConfigError
from trainer_hooks.jobs import load_dataclass
from trainer_hooks.trl_rollouts import TRLRollouts

LEARNING_RATE = 2e-4
WINDOW_STEPS = 10


def run_job(settings: JobSettings, num_steps: int, num_compared: int) -> dict[str, float]:
    """Warm up, train with the engine, compare, and write summary.json, which is returned.

    Raises ConfigError if trl is not installed, before anything takes time.
    """
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "this example needs trl: pip install 'rollout-engine[trl,demo]'"
        ) from error
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.trainer.num_threads)
    task = PalindromeTask(settings.task)
    tokenizer = build_tokenizer(task.constant_parts)
    policy = build_policy(settings.model, tokenizer)
    params = sampling_params(settings, tokenizer)
    asyncio.run(warmed_up(policy, tokenizer, task, settings, params))
    start, directory = copy.deepcopy(policy), Path("outputs/train_trl")
    with LLM(policy, inference_config=settings.engine) as llm:
        trainer = make_trainer(settings, task, policy, num_steps, TRLRollouts(llm), directory)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "reward" in row]
        summary = reward_summary(rows)
        if num_compared:
            summary |= compare(settings, task, start, llm, num_compared, directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


async def warmed_up(
    policy: Any, tokenizer: Any, task: PalindromeTask, settings: JobSettings, params: Any
) -> None:
    """As for the demo: GRPO needs some right answers among the samples to begin with."""
    engine = settings.engine
    async for _ in warm_up(policy, tokenizer, task, settings.seed, settings.warmup, params, engine):
        pass


def make_trainer(
    settings: JobSettings,
    task: PalindromeTask,
    policy: Any,
    num_steps: int,
    rollouts: TRLRollouts | None,
    directory: Path,
) -> Any:
    """A GRPOTrainer of the demo's sizes that generates through `rollouts`, or itself for None.

    A step is one generation, trained on in `num_minibatches` parts.
    """
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    sizes = settings.algorithm
    prompts = task.prompts(settings.seed)
    rows = range(min(len(prompts), num_steps * sizes.groups_per_step))

    def reward(
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        index: Sequence[int],
        **columns: Any,
    ) -> list[float | None]:
        entries = [prompts[i].columns["entry"] for i in index]
        return task.reward(completions, completion_ids, entries)

    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(directory / "trl"),
            per_device_train_batch_size=(
                sizes.groups_per_step * sizes.group_size // sizes.num_minibatches
            ),
            steps_per_generation=sizes.num_minibatches,
            num_generations=sizes.group_size,
            max_completion_length=sizes.max_new_tokens,
            max_steps=num_steps * sizes.num_minibatches,
            learning_rate=LEARNING_RATE,
            warmup_steps=min(10, num_steps - 1) * sizes.num_minibatches,
            adam_beta2=0.99,
            max_grad_norm=settings.trainer.max_grad_norm,
            epsilon_high=0.28,
            scale_rewards=False,
            logging_steps=1,
            seed=settings.seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            log_level="error",
        ),
        train_dataset=Dataset.from_list([{"prompt": prompts[i].prompt, "index": i} for i in rows]),
        processing_class=build_tokenizer(task.constant_parts),
        rollout_func=rollouts,
    )
    trainer.remove_callback(PrinterCallback)  # a line per optimizer step
    if rollouts is not None:
        rollouts.attach(trainer)
    return trainer


def reward_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the first and last steps, and the largest difference of a log-prob."""
    rewards = [row["reward"] for row in rows]
    first, last = fmean(rewards[:WINDOW_STEPS]), fmean(rewards[-WINDOW_STEPS:])
    return {
        "reward_first": first,
        "reward_last": last,
        "reward_gain": last - first,
        "max_logprob_difference": max(r["sampling/sampling_logp_difference/max"] for r in rows),
    }


def compare(
    settings: JobSettings,
    task: PalindromeTask,
    start: Any,
    llm: LLM,
    num_compared: int,
    directory: Path,
) -> dict[str, float]:
    """CPU seconds of a step from the same policy, with the engine and without it in turn.

    Both use one thread, so on an idle machine these are the seconds one waits. The first step of
    each trainer is left out: it also warms up.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.at_s: list[float] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.at_s.append(time.process_time())

    seconds: dict[str, list[float]] = {"engine": [], "built_in": []}
    for _ in range(num_compared):
        for kind, rollouts in (("engine", TRLRollouts(llm)), ("built_in", None)):
            trainer = make_trainer(settings, task, copy.deepcopy(start), 2, rollouts, directory)
            trainer.add_callback(clock := Clock())
            trainer.train()
            seconds[kind].append(
                clock.at_s[-1] - clock.at_s[settings.algorithm.num_minibatches - 1]
            )
    ratios = [b / e for e, b in zip(seconds["engine"], seconds["built_in"], strict=True)]
    return {
        "step_cpu_s_engine": median(seconds["engine"]),
        "step_cpu_s_built_in": median(seconds["built_in"]),
        "built_in_over_engine": median(ratios),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compare", type=int, default=6)
    arguments = parser.parse_args()
    try:
        with initialize_config_module(config_module="conf", version_base="1.3"):
            demo = load_dataclass(JobSettings, compose("train_grpo"))
        print(json.dumps(run_job(demo, arguments.steps, arguments.compare), indent=2))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
