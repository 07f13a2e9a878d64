"""TRL's own GRPOTrainer on the demo task, with rollouts from this engine.

    python examples/train_trl.py

TRL computes loss and optimizer steps, and corrects by the ratio of its log-probs to those of the
engine, which differ by rounding only. It prints how the reward rose, the largest difference of a
log-prob, and the time of a step against that with TRL's built-in generation, in the same run.
Needs trl: pip install 'rollout-engine[trl,demo]'.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from examples.grpo.policy import build_policy, build_tokenizer
from examples.grpo.settings import ModelSettings, TaskSettings, WarmupSettings
from examples.grpo.task import PalindromeTask, ProblemStream
from examples.grpo.warmup import supervise
from rollout import LLM, ConfigError, InferenceConfig, SamplingParams
from trainer_hooks import InProcessWeightSync, generation_phase
from trainer_hooks.hydra_job import run_hydra_job
from trainer_hooks.trl_rollouts import TRLRollouts

WINDOW_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlJobSettings:
    """conf/train_trl.yaml. A step is one generation, trained on in `num_minibatches` parts."""

    run_name: str
    seed: int
    num_threads: int
    num_steps: int
    num_minibatches: int
    compare_steps: int
    groups_per_step: int
    group_size: int
    max_new_tokens: int
    learning_rate: float
    num_prompts: int
    engine: InferenceConfig
    model: ModelSettings
    task: TaskSettings
    warmup: WarmupSettings

    def __post_init__(self) -> None:
        num_rollouts = self.groups_per_step * self.group_size
        if self.num_minibatches < 1 or num_rollouts % self.num_minibatches:
            raise ConfigError(
                f"num_minibatches={self.num_minibatches} must divide the {num_rollouts} rollouts "
                "of a step, groups_per_step * group_size"
            )


def run_job(settings: TrlJobSettings) -> None:
    """Warm up, train with the engine, compare, and write summary.json.

    Raises ConfigError if trl is not installed, before anything takes time.
    """
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "this example needs trl: pip install 'rollout-engine[trl,demo]'"
        ) from error
    disable_progress_bar()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.num_threads)
    directory, console = Path(HydraConfig.get().runtime.output_dir), Console()
    task = PalindromeTask(settings.task)
    tokenizer = build_tokenizer(task.constant_parts)
    policy = build_policy(settings.model, tokenizer)
    with LLM(policy, inference_config=settings.engine) as llm:
        stream = ProblemStream(task, settings.seed)
        warm_up(settings, policy, tokenizer, task, stream, llm)
        data = TrainerFactory(settings, task, tokenizer, stream)
        start = copy.deepcopy(policy)
        trainer = data.trainer(policy, settings.num_steps, directory, TRLRollouts(llm))
        with console.status("TRL trains"):
            trainer.train()
        rows = [row for row in trainer.state.log_history if "reward" in row]
        summary = reward_summary(rows) | compare(settings, data, start, llm, directory)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print_json(data=summary)


def warm_up(
    settings: TrlJobSettings,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: PalindromeTask,
    stream: ProblemStream,
    llm: LLM,
) -> None:
    """As for the other jobs: GRPO needs some right answers among the samples to begin with."""
    params = SamplingParams(
        num_tokens_to_generate=settings.max_new_tokens, termination_id=tokenizer.eos_token_id
    )

    def sampled_reward() -> float:
        problems = stream.take(settings.warmup.check_prompts)
        with generation_phase(llm, InProcessWeightSync(llm), policy):
            requests = llm.generate([tokenizer.encode(p.question) for p in problems], params)
        ids = [request.generated_tokens for request in requests]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        entries = [problem.entry for problem in problems]
        return fmean(task.reward([], texts, ids, entries))

    for _ in supervise(policy, tokenizer, stream, settings.warmup, sampled_reward):
        pass


@dataclass(frozen=True, slots=True)
class TrainerFactory:
    """What both kinds of trainer are made from."""

    settings: TrlJobSettings
    task: PalindromeTask
    tokenizer: PreTrainedTokenizerFast
    stream: ProblemStream

    def trainer(
        self, policy: PreTrainedModel, num_steps: int, directory: Path, rollouts: TRLRollouts | None
    ) -> Any:
        """A GRPOTrainer that generates through `rollouts`, or itself."""
        from datasets import Dataset
        from transformers import PrinterCallback
        from trl import GRPOTrainer

        settings = self.settings
        num_prompts = min(settings.num_prompts, num_steps * settings.groups_per_step)
        problems = self.stream.take(num_prompts)
        entries = {problem.index: problem.entry for problem in problems}

        def reward(
            prompts: Sequence[str],
            completions: Sequence[str],
            completion_ids: Sequence[Sequence[int]],
            index: Sequence[int],
            **columns: Any,
        ) -> list[float | None]:
            own = [entries[i] for i in index]
            return self.task.reward(prompts, completions, completion_ids, own)

        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=self._config(num_steps, directory),
            train_dataset=Dataset.from_list(
                [{"prompt": problem.question, "index": problem.index} for problem in problems]
            ),
            processing_class=self.tokenizer,
            rollout_func=rollouts,
        )
        trainer.remove_callback(PrinterCallback)  # a line per optimizer step
        if rollouts is not None:
            rollouts.attach(trainer)
        return trainer

    def _config(self, num_steps: int, directory: Path) -> Any:
        """TRL's own, of the demo's sizes."""
        from trl import GRPOConfig

        settings = self.settings
        num_rollouts = settings.groups_per_step * settings.group_size
        return GRPOConfig(
            output_dir=str(directory / "trl"),
            per_device_train_batch_size=num_rollouts // settings.num_minibatches,
            steps_per_generation=settings.num_minibatches,
            num_generations=settings.group_size,
            max_completion_length=settings.max_new_tokens,
            max_steps=num_steps * settings.num_minibatches,
            learning_rate=settings.learning_rate,
            warmup_steps=min(10, num_steps - 1) * settings.num_minibatches,
            adam_beta2=0.99,
            max_grad_norm=1.0,
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
        )


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
    settings: TrlJobSettings,
    data: TrainerFactory,
    start: PreTrainedModel,
    llm: LLM,
    directory: Path,
) -> dict[str, float]:
    """CPU seconds of a step from the same policy, of one kind and the other in turn. Both use one
    thread, so on an idle machine these are the seconds one waits.
    """
    seconds: dict[str, list[float]] = {"engine": [], "built_in": []}
    for _ in range(settings.compare_steps):
        for kind, rollouts in (("engine", TRLRollouts(llm)), ("built_in", None)):
            trainer = data.trainer(copy.deepcopy(start), 2, directory, rollouts)
            clock = step_clock()
            trainer.add_callback(clock)
            trainer.train()
            # Of the second step: the first one also warms up.
            seconds[kind].append(sum(clock.seconds[-settings.num_minibatches :]))
    if not settings.compare_steps:
        return {}
    ratios = [b / e for e, b in zip(seconds["engine"], seconds["built_in"], strict=True)]
    return {
        "step_cpu_s_engine": median(seconds["engine"]),
        "step_cpu_s_built_in": median(seconds["built_in"]),
        "built_in_over_engine": median(ratios),
    }


def step_clock() -> Any:
    """A callback that keeps the CPU seconds of each optimizer step, its generation included."""
    from transformers import TrainerCallback

    class StepClock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._start = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self._start = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.process_time() - self._start)

    return StepClock()


if __name__ == "__main__":
    run_hydra_job(run_job, TrlJobSettings, config_path="pkg://conf", config_name="train_trl")
