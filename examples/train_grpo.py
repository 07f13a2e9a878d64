"""GRPO from a random model to a verified skill, on a CPU, through the rollout engine.

    python examples/train_grpo.py                                   # seed 0
    python examples/train_grpo.py seeds=3                           # seeds 0, 1, 2, then a table
    python examples/train_grpo.py resume=auto                       # go on after a kill or Ctrl-C
    python examples/train_grpo.py run_name=shuffled algorithm.shuffle_rewards=true     # the control
    python examples/train_grpo.py run_name=async num_engines=1 weight_sync=in_flight
    python examples/train_grpo.py run_name=ppo algorithm=ppo        # with a critic
    python examples/train_grpo.py --multirun algorithm.group_size=4,8

It shows that GRPO climbs on the verifier of a third-party library, not that it beats more
supervision. Results are in outputs/train_grpo/<run_name>/seed_<seed>: metrics.jsonl, batches.jsonl
(the prompts of each step, as [epoch, index]), checkpoints, reward_curve.png, summary.json, and
reference/ where the loss has a KL term.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from examples.learner import Learner
from examples.palindromes import (
    PalindromeTask,
    build_policy,
    build_tokenizer,
    warm_up,
)
from examples.settings import JobSettings
from examples.summary import summarise, summary_table
from rollout import LLM, AsyncLLM, SamplingParams
from trainer_hooks import (
    AsyncRolloutProducer,
    MetricsLogger,
    ThreadedLLM,
    TrainerState,
    TrainingBatch,
    WeightsVersionCounter,
    WeightSync,
    evaluate,
    find_checkpoint,
    generation_phase,
    load_checkpoint,
    read_trainer_state,
    save_checkpoint,
)
from trainer_hooks.jobs import (
    Dashboard,
    open_logger,
    run_hydra_job,
    set_aside,
    stop_on_interrupt,
    write_reward_curve,
)
from trainer_hooks.metrics import (
    EngineUse,
    JsonlWriter,
    ProgressView,
    TimeAccount,
    read_jsonl,
    rollout_metrics,
    step_metrics,
)

INTERRUPTED_EXIT_CODE = 130
WARMUP_COLUMNS = {"warmup/loss": "loss {:.3f}", "warmup/reward": "sampled reward {:.3f}"}


def run_job(settings: JobSettings) -> None:
    """All runs of the job, one after another, and a table of what they showed."""
    disable_progress_bar()
    console = Console(quiet=not settings.logger.console)
    directory = Path(HydraConfig.get().runtime.output_dir)
    summaries = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        run_directory = directory / f"seed_{seed}"
        console.print(f"[bold]seed {seed}[/bold] in {run_directory}", highlight=False)
        try:
            summaries.append(run_seed(run_directory, settings, seed))
        except KeyboardInterrupt:
            console.print("interrupted; the same command with resume=auto goes on from here")
            sys.exit(INTERRUPTED_EXIT_CODE)
        console.print(summary_table(summaries[-1:], settings.title))
        policy = find_checkpoint(run_directory / "checkpoints")
        console.print(f"policy in {policy}", highlight=False)
    if len(summaries) > 1:
        console.print(summary_table(summaries, settings.title))


def run_seed(directory: Path, settings: JobSettings, seed: int) -> dict[str, float]:
    """One run: warm-up, training, greedy evaluation before and after. Returns its summary.

    Raises KeyboardInterrupt at a step edge after Ctrl-C, with a checkpoint once training has begun.
    """
    asyncio.run(train(directory, settings, seed))
    rows = read_jsonl(directory / "metrics.jsonl")
    summary = summarise(rows, seed)
    rewards = [row["reward"] for row in rows if "reward" in row]
    title = f"{settings.title}, palindrome_generation, seed {seed}"
    write_reward_curve(directory / "reward_curve.png", rewards, title=title)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


async def train(directory: Path, settings: JobSettings, seed: int) -> None:
    """One run from its newest checkpoint, if it may go on, to its last step and evaluation."""
    torch.set_num_threads(settings.trainer.num_threads)
    torch.manual_seed(seed)
    task = PalindromeTask(settings.task)
    checkpoint = find_checkpoint(directory / "checkpoints") if settings.resume == "auto" else None
    if checkpoint is None:
        checkpoint = await begin(directory, settings, seed, task)
    learner = Learner.load(checkpoint, settings.algorithm, settings.trainer)
    state = read_trainer_state(checkpoint)
    # Also of step 0: a run that is killed before its next checkpoint does all again as it did.
    load_checkpoint(checkpoint, learner.optimizer)
    view = Dashboard(Console(quiet=not settings.logger.console))
    with (
        stop_on_interrupt() as stop,
        open_logger(
            directory, settings.logger, settings.run_name, settings, view, state.step
        ) as logger,
        closing(JsonlWriter(directory / "batches.jsonl", resume_step=state.step)) as batches,
    ):
        view.start_stage(settings.title, settings.trainer.num_steps)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        versions = WeightsVersionCounter(directory / "weights_version", state.weights_version)
        async with (
            engines(learner.policy, tokenizer, settings, seed, versions.reserve()) as llm,
            make_producer(llm, settings, seed, task, tokenizer, state) as producer,
        ):
            loop = TrainingLoop(
                directory=directory,
                settings=settings,
                tokenizer=tokenizer,
                learner=learner,
                llm=llm,
                producer=producer,
                versions=versions,
                logger=logger,
                batches=batches,
            )
            await loop.run(state.step, stop)
            async with generation_phase(llm):
                greedy = await greedy_reward(llm, settings, task, tokenizer)
            logger.log(greedy, step=settings.trainer.num_steps, version=llm.weights_version)


async def begin(directory: Path, settings: JobSettings, seed: int, task: PalindromeTask) -> Path:
    """Warm up, evaluate, and leave the checkpoint of step 0, which is returned."""
    set_aside(directory)
    tokenizer = build_tokenizer(task.constant_parts)
    policy = build_policy(settings.model, tokenizer)
    view = ProgressView(Console(quiet=not settings.logger.console), WARMUP_COLUMNS)
    with (
        stop_on_interrupt() as stop,
        open_logger(directory, settings.logger, settings.run_name, settings, view) as logger,
    ):
        view.start_stage("warm-up", settings.warmup.max_steps, "warmup/step")
        params = sampling_params(settings, tokenizer)
        async for row in warm_up(
            policy, tokenizer, task, seed, settings.warmup, params, settings.engine
        ):
            logger.log(row, step=0, version=0)
            if stop.is_set():
                raise KeyboardInterrupt
        with LLM(policy, tokenizer, settings.engine) as llm:
            async with ThreadedLLM(llm) as threaded:
                greedy = await greedy_reward(threaded, settings, task, tokenizer)
        logger.log(greedy, step=0, version=0)
    learner = Learner(policy, settings.algorithm, settings.trainer)
    if settings.algorithm.loss.kl_coefficient > 0.0:
        # Not a checkpoint: the oldest are deleted, and a resumed run needs the same reference.
        policy.save_pretrained(directory / "reference")
    state = TrainerState(step=0, weights_version=0)
    return save_checkpoint(directory / "checkpoints", state, learner, learner.optimizer, tokenizer)


@asynccontextmanager
async def engines(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    settings: JobSettings,
    seed: int,
    version: int,
) -> AsyncIterator[ThreadedLLM | AsyncLLM]:
    """The engine in this process, or those in processes of their own, with the policy as it is now.

    They get the policy itself: a checkpoint may be deleted before an engine is started again.
    """
    config = replace(settings.engine, seed=seed)
    if settings.num_engines:
        async with AsyncLLM(
            policy,
            tokenizer,
            inference_config=config,
            data_parallel_size=settings.num_engines,
            weights_version=version,
        ) as llm:
            yield llm
    else:
        with LLM(policy, tokenizer, config, weights_version=version) as direct:
            async with ThreadedLLM(direct) as threaded:
                yield threaded


def make_producer(
    llm: ThreadedLLM | AsyncLLM,
    settings: JobSettings,
    seed: int,
    task: PalindromeTask,
    tokenizer: PreTrainedTokenizerFast,
    state: TrainerState,
) -> AsyncRolloutProducer:
    """The producer group of the config on this task, where the checkpoint left its prompts."""
    producer = AsyncRolloutProducer(
        llm,
        task.prompts(seed),
        task.reward,
        settings.algorithm.group_size,
        settings.algorithm.groups_per_step,
        sampling_params=sampling_params(settings, tokenizer),
        tokenizer=tokenizer,
        seed=seed,
        pad_id=tokenizer.pad_token_id,
        **asdict(settings.producer),
    )
    if state.prompts:
        producer.load_state_dict(state.prompts)
    return producer


def sampling_params(settings: JobSettings, tokenizer: PreTrainedTokenizerFast) -> SamplingParams:
    """With the log-probs that the loss corrects by."""
    return SamplingParams(
        temperature=settings.algorithm.temperature,
        num_tokens_to_generate=settings.algorithm.max_new_tokens,
        termination_id=tokenizer.eos_token_id,
        return_log_probs=True,
        logprobs_mode="temperature",
    )


async def greedy_reward(
    llm: ThreadedLLM | AsyncLLM,
    settings: JobSettings,
    task: PalindromeTask,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, float]:
    """The mean reward of greedy answers to the held-out problems, as a metric."""
    params = replace(sampling_params(settings, tokenizer), temperature=0.0, return_log_probs=False)
    metrics = await evaluate(llm, task.held_out, task.reward, params, tokenizer=tokenizer)
    return {"eval/greedy_reward": metrics["eval/reward"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """The loop: take a batch, train on it, push the weights, log, and save now and then."""

    directory: Path
    settings: JobSettings
    tokenizer: PreTrainedTokenizerFast
    learner: Learner
    llm: ThreadedLLM | AsyncLLM
    producer: AsyncRolloutProducer
    versions: WeightsVersionCounter
    logger: MetricsLogger
    batches: JsonlWriter

    async def run(self, step: int, stop: threading.Event) -> None:
        """Train from `step` to the last one. On `stop` save and raise KeyboardInterrupt.

        Engines generate meanwhile if weights are synchronised in flight. Else they are suspended
        while the trainer trains; rollouts that are not finished by then go on under new weights.
        """
        trainer, sync = self.settings.trainer, self.settings.weight_sync
        is_in_flight = sync.mode == "in_flight"
        weight_sync = WeightSync(self.llm, in_flight=is_in_flight)
        account, use = TimeAccount(), EngineUse(max(self.settings.num_engines, 1))
        while step < trainer.num_steps:
            if stop.is_set():
                self.save(step)
                raise KeyboardInterrupt
            if is_in_flight:
                with account.spend("wait"):
                    batch = await anext(self.producer)
            else:
                with account.spend("generate"):
                    async with generation_phase(self.llm, release=sync.release) as phase:
                        batch = await anext(self.producer)
                account.reassign_phase(phase.timings())
            step += 1
            with account.spend("train"):
                # In a thread of its own: this one takes in what the engines send meanwhile.
                trained = await asyncio.to_thread(self.learner.update, batch.rollouts, step)
            with account.spend("update"):
                await weight_sync.apush(self.learner.policy, self.versions.reserve())
            self.producer.note_version()  # so that the engines begin what the new version allows
            stats = await self.llm.stats()
            times = step_metrics(
                account.take(),
                num_generated_tokens=int(batch.rollouts.completion_lengths_B.sum()),
                num_trained_tokens=int(trained["train/num_tokens"]),
            )
            self.log(batch, step, {**trained, **stats.as_metrics(), **use.take(stats), **times})
            # After its rows, so that a resumed run finds those of every step that it has done. The
            # time is the next step's.
            if step % trainer.checkpoint_interval == 0 or step == trainer.num_steps:
                with account.spend("checkpoint"):
                    self.save(step)

    def log(self, batch: TrainingBatch, step: int, metrics: dict[str, Any]) -> None:
        """Record the step, and which prompts it was trained on."""
        rollouts = rollout_metrics(
            batch.rollouts, batch.group_size, finish_reasons=batch.finish_reasons
        )
        self.logger.log({**rollouts, **batch.metrics, **metrics}, step=step, version=batch.version)
        prompts = [[group.ticket.epoch, group.ticket.index] for group in batch.groups]
        self.batches.log({"trainer/step": step, "prompts": prompts})

    def save(self, step: int) -> Path:
        """Write the checkpoint of a run that has done `step` training steps."""
        state = TrainerState(
            step=step,
            weights_version=self.versions.highest,
            prompts=self.producer.state_dict(),
        )
        root, learner = self.directory / "checkpoints", self.learner
        return save_checkpoint(root, state, learner, learner.optimizer, self.tokenizer)


if __name__ == "__main__":
    run_hydra_job(
        run_job,
        JobSettings,
        config_path="pkg://conf",
        config_name="train_grpo",
        shows_config=lambda settings: settings.logger.console,
    )
