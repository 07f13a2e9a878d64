"""TRL's own GRPOTrainer on the demo task, with rollouts from this engine.

    python examples/train_trl.py [--steps 60]

TRL computes the loss and takes the optimizer steps. TRL corrects the loss by the ratio of its
probabilities to the engine's, which differ only by rounding. The program prints how the reward rose
and the largest difference of a log-prob, and writes to outputs/train_trl. The program needs trl:
pip install 'trl>=1.16' reasoning-gym. `benchmarks.trl_step` uses `require_trl`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback

from rollout import LLM, ConfigError
from rollout.set_aside import set_aside
from rollout.text import RenderedText
from trainer_hooks import PromptItem
from trainer_hooks.metrics.figures import sampled_reward
from trainer_hooks.rewards import reasoning_gym_reward
from trainer_hooks.train.job import JobSettings, compose_settings
from trainer_hooks.train.task import Task
from trainer_hooks.train.warm_up import warm_up
from trainer_hooks.trl_rollouts import TRLRollouts

LEARNING_RATE = 2e-4
DIRECTORY = Path("outputs/train_trl")


def run_job(settings: JobSettings, num_steps: int) -> dict[str, float | None]:
    """Warm up, train `num_steps` steps with the engine, and write summary.json.

    Returns the summary. Raises ConfigError if trl is not installed.
    """
    require_trl()
    if (earlier := set_aside(DIRECTORY)) is not None:
        print(f"moved the earlier run to {earlier}")
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.trainer.num_threads or torch.get_num_threads())
    task = Task(settings.model, settings.data, settings.reward)
    policy = task.new_policy()
    asyncio.run(warm_up_to_the_end(policy, task, settings))
    with LLM(policy, inference_config=settings.engine, seed=settings.seed) as llm:
        trainer = make_trainer(settings, task, policy, num_steps, TRLRollouts(llm), DIRECTORY)
        trainer.train()
    summary = reward_summary([row for row in trainer.state.log_history if "reward" in row])
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    (DIRECTORY / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def require_trl() -> None:
    """Raise ConfigError if trl is not installed. Silences trl's notice on experimental parts."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "this example needs trl: pip install 'trl>=1.16' reasoning-gym"
        ) from error


async def warm_up_to_the_end(policy: PreTrainedModel, task: Task, settings: JobSettings) -> None:
    """Warm up the policy as the demo does, because GRPO needs some right answers at its start."""
    params = settings.algorithm.sampling_params()
    stage = settings.warmup, params, settings.engine
    async for _ in warm_up(policy, task, settings.seed, *stage):
        pass


def make_trainer(
    settings: JobSettings,
    task: Task,
    policy: PreTrainedModel,
    num_steps: int,
    rollouts: TRLRollouts | None,
    directory: Path,
) -> Any:
    """Return a GRPOTrainer of the demo's sizes. Without `rollouts` it generates by itself."""
    from datasets import Dataset
    from trl.trainer.grpo_trainer import GRPOTrainer

    prompts = task.prompts(settings.seed)
    rows = range(min(len(prompts), num_steps * settings.algorithm.groups_per_step))

    def reward(
        completion_ids: Sequence[Sequence[int]], index: Sequence[int], **columns: Any
    ) -> list[float | None]:
        texts = task.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        entries = [prompts[i].columns["entry"] for i in index]
        return reasoning_gym_reward(texts, completion_ids, entries)

    def prompt_of(item: PromptItem) -> Any:
        # TRL adds special tokens to text, and a rendered text has them already.
        return item.columns["messages"] if isinstance(item.prompt, RenderedText) else item.prompt

    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=trl_config(settings, num_steps, directory),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt_of(prompts[i]), "index": i} for i in rows]
        ),
        processing_class=task.tokenizer,
        rollout_func=rollouts,
    )
    trainer.remove_callback(PrinterCallback)  # a line per optimizer step
    if rollouts is not None:
        rollouts.attach(trainer)
    return trainer


def trl_config(settings: JobSettings, num_steps: int, directory: Path) -> Any:
    """Return a GRPOConfig of the demo's sizes, with `num_minibatches` parts per generation."""
    from trl.trainer.grpo_config import GRPOConfig

    sizes, num_parts = settings.algorithm, settings.algorithm.num_minibatches
    return GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=sizes.groups_per_step * sizes.group_size // num_parts,
        steps_per_generation=num_parts,
        num_generations=sizes.group_size,
        chat_template_kwargs=dict(settings.data.template_options),
        max_completion_length=sizes.max_new_tokens,
        max_steps=num_steps * num_parts,
        learning_rate=LEARNING_RATE,
        warmup_steps=min(10, num_steps - 1) * num_parts,
        adam_beta2=0.99,
        max_grad_norm=settings.trainer.max_grad_norm,
        epsilon_high=0.28,
        scale_rewards="none",
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


def reward_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return mean rewards of the first and last steps, and the largest difference of a log-prob."""
    reward = sampled_reward(rows)
    assert reward is not None, "TRL logs it"
    return {
        "reward_first": reward.before,
        "reward_last": reward.after,
        "reward_gain": reward.gain,
        "max_logprob_difference": max(r["sampling/sampling_logp_difference/max"] for r in rows),
    }


def demo_settings() -> JobSettings:
    """Return the settings of `rollout train --config-name demo`."""
    return compose_settings(config_name="demo")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    try:
        print(json.dumps(run_job(demo_settings(), parser.parse_args().steps), indent=2))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
