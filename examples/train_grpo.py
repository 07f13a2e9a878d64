"""GRPO and its kin on a model, prompts and rewards of your own, or on the demo's.

    python examples/train_grpo.py                                   # the demo, seed 0
    python examples/train_grpo.py model.path=DIR data=jsonl data.path=train.jsonl reward=mine:score
    python examples/train_grpo.py resume=auto                       # go on after a kill or Ctrl-C
    python examples/train_grpo.py run_name=seeds seeds=3            # seeds 0, 1, 2, then a table
    python examples/train_grpo.py run_name=shuffled algorithm.shuffle_rewards=true     # the control
    python examples/train_grpo.py run_name=async num_engines=1 weight_sync=in_flight
    python examples/train_grpo.py run_name=ppo algorithm=ppo        # with a critic
    python examples/train_grpo.py run_name=sizes --multirun algorithm.group_size=4,8

The demo shows that GRPO climbs on the verifier of a third-party library, not that it beats more
supervision. Results are in outputs/train_grpo/<run_name>/seed_<seed>: metrics.jsonl, batches.jsonl
(the prompts of each step, as [epoch, index]), completions.jsonl (samples), checkpoints,
report.html, reward_curve.png, summary.json, and reference/ where the loss has a KL term. A run that
starts over renames the folder of the one before to seed_<seed>.previous.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from examples.learner import Learner
from examples.settings import JobSettings
from examples.summary import answers_table, summarise, summary_table
from rollout import LLM, AsyncLLM
from trainer_hooks import (
    AsyncRolloutProducer,
    ThreadedLLM,
    TrainerState,
    TrainingBatch,
    WeightsVersionCounter,
    WeightSync,
    find_checkpoint,
    generation_phase,
    jobs,
    metrics,
    save_checkpoint,
)
from trainer_hooks.jobs.report import write_report
from trainer_hooks.jobs.task import Task
from trainer_hooks.jobs.warm_up import warm_up
from trainer_hooks.rewards import reward_metrics

INTERRUPTED_EXIT_CODE = 130
NUM_ANSWERS = 2  # held-out problems whose answers are shown, before and after
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
        answers = metrics.read_jsonl(run_directory / "answers.jsonl")
        if answers[0]["answers"]:
            console.print(answers_table(answers))
        policy = find_checkpoint(run_directory / "checkpoints")
        console.print(f"policy in {policy}", highlight=False)
    if len(summaries) > 1:
        console.print(summary_table(summaries, settings.title))


def run_seed(directory: Path, settings: JobSettings, seed: int) -> dict[str, float]:
    """One run: warm-up, training, greedy evaluation before and after. Returns its summary.

    Raises KeyboardInterrupt at a step edge after Ctrl-C, with a checkpoint once training has begun.
    """
    asyncio.run(Run(directory, settings, seed).train())
    rows = metrics.read_jsonl(directory / "metrics.jsonl")
    summary = summarise(rows, seed)
    title = f"{settings.title}, seed {seed}"
    jobs.write_run_picture(directory / "reward_curve.png", rows, title)
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report(directory, title)
    return summary


class Run:
    """One run, and what all its parts use."""

    def __init__(self, directory: Path, settings: JobSettings, seed: int) -> None:
        self.directory, self.settings, self.seed = directory, settings, seed
        self.checkpoints = directory / "checkpoints"
        self.console = Console(quiet=not settings.logger.console)
        self.task = Task(settings.model, settings.data, settings.reward, settings.warmup.source)
        self.params = settings.algorithm.sampling_params(self.task.tokenizer.eos_token_id)
        torch.set_num_threads(settings.trainer.num_threads or torch.get_num_threads())
        torch.manual_seed(seed)

    async def train(self) -> None:
        """From the newest checkpoint, if the run may go on, to the last step and evaluation."""
        settings, view = self.settings, jobs.Dashboard(self.console)
        checkpoint = find_checkpoint(self.checkpoints) if settings.resume == "auto" else None
        if checkpoint is None:
            checkpoint = await self.begin()
        # Also of step 0, whose random states let a run by turns repeat its first steps exactly.
        learner, state = Learner.load(checkpoint, settings)
        versions = WeightsVersionCounter(self.directory / "weights_version", state.weights_version)
        with (
            jobs.stop_on_interrupt() as stop,
            jobs.open_logger(self.directory, settings, view, state.step) as logger,
            closing(metrics.JsonlWriter(self.directory / "batches.jsonl", state.step)) as batches,
            jobs.SampleLog(
                self.directory, self.task.tokenizer, settings.logger, view, logger, state.step
            ) as samples,
        ):
            view.start_stage(settings.title, settings.trainer.num_steps)
            async with self.engines(learner, versions.reserve()) as llm:
                if state.step == 0:
                    logger.log(await self.evaluate(llm, step=0), step=0, version=0)
                async with (
                    self.producer(llm, state) as producer,
                    jobs.watch_step(view, llm, producer),
                ):
                    steps = self.steps(learner, llm, producer, versions, state.step, stop)
                    async for step, batch, row in steps:
                        logger.log(row, step=step, version=batch.version)
                        prompts = [[g.ticket.epoch, g.ticket.index] for g in batch.groups]
                        batches.log({"trainer/step": step, "prompts": prompts})
                        samples.log(step, batch, learner.advantages_B)
                last = settings.trainer.num_steps
                logger.log(await self.evaluate(llm, last), step=last, version=llm.weights_version)

    async def evaluate(self, llm: ThreadedLLM | AsyncLLM, step: int) -> dict[str, float]:
        """The greedy reward of the weights after `step`; some answers go to answers.jsonl."""
        sync = self.settings.weight_sync
        phase: AbstractAsyncContextManager[Any] = generation_phase(llm, release=sync.release)
        async with nullcontext() if sync.mode == "in_flight" else phase:
            reward = await self.task.greedy_reward(llm, self.params)
            answers = await self.task.greedy_answers(llm, self.params, NUM_ANSWERS)
        with closing(metrics.JsonlWriter(self.directory / "answers.jsonl", step - 1)) as file:
            file.log({"trainer/step": step, "answers": answers})
        return reward

    async def begin(self) -> Path:
        """Warm up, if that is wanted, and leave the checkpoint of step 0, which is returned."""
        settings = self.settings
        jobs.set_aside(self.directory)
        policy = self.task.new_policy()
        if settings.warmup.max_steps:
            await self.warm_up(policy)
        if settings.algorithm.loss.kl_coefficient > 0.0:
            # Not a checkpoint: the oldest are deleted, and a resumed run needs the same reference.
            policy.save_pretrained(self.directory / "reference")
        learner = Learner(policy, settings.algorithm, settings.trainer)
        return self.save(learner, TrainerState(step=0, weights_version=0))

    async def warm_up(self, policy: PreTrainedModel) -> None:
        settings, view = self.settings, metrics.ProgressView(self.console, WARMUP_COLUMNS)
        with (
            jobs.stop_on_interrupt() as stop,
            jobs.open_logger(self.directory, settings, view) as logger,
        ):
            view.start_stage("warm-up", settings.warmup.max_steps, "warmup/step")
            stage = settings.warmup, self.params, settings.engine
            async for row in warm_up(policy, self.task, self.seed, *stage):
                logger.log(row, step=0, version=0)
                if stop.is_set():
                    raise KeyboardInterrupt

    def save(self, learner: Learner, state: TrainerState) -> Path:
        return save_checkpoint(
            self.checkpoints, state, learner, learner.optimizer, self.task.tokenizer
        )

    @asynccontextmanager
    async def engines(
        self, learner: Learner, version: int
    ) -> AsyncIterator[ThreadedLLM | AsyncLLM]:
        """The engine in this process, or those in processes of their own, with the policy as it is.

        They get the policy itself: a checkpoint may be deleted before an engine is started again.
        """
        policy, tokenizer = learner.policy, self.task.tokenizer
        config = replace(self.settings.engine, seed=self.seed)
        if num_engines := self.settings.num_engines:
            async with AsyncLLM(
                policy, tokenizer, config, data_parallel_size=num_engines, weights_version=version
            ) as llm:
                yield llm
        else:
            with LLM(policy, tokenizer, config, weights_version=version) as direct:
                async with ThreadedLLM(direct) as threaded:
                    yield threaded

    def producer(self, llm: ThreadedLLM | AsyncLLM, state: TrainerState) -> AsyncRolloutProducer:
        """The producer group of the config on this task, where the checkpoint left its prompts."""
        algorithm, tokenizer = self.settings.algorithm, self.task.tokenizer
        producer = AsyncRolloutProducer(
            llm,
            self.task.prompts(self.seed),
            self.task.reward,
            algorithm.group_size,
            algorithm.groups_per_step,
            sampling_params=self.params,
            tokenizer=tokenizer,
            seed=self.seed,
            pad_id=tokenizer.pad_token_id,
            **asdict(self.settings.producer),
        )
        if state.prompts:
            producer.load_state_dict(state.prompts)
        return producer

    async def steps(
        self,
        learner: Learner,
        llm: ThreadedLLM | AsyncLLM,
        producer: AsyncRolloutProducer,
        versions: WeightsVersionCounter,
        step: int,
        stop: threading.Event,
    ) -> AsyncIterator[tuple[int, TrainingBatch, dict[str, float]]]:
        """Train from `step` to the last one; yields each step with its batch and metrics.

        Engines generate meanwhile if weights are synchronised in flight. Otherwise they are
        suspended while the trainer trains; rollouts that are unfinished go on under new weights.
        On `stop` it saves and raises KeyboardInterrupt.
        """
        trainer = self.settings.trainer
        weight_sync = WeightSync(llm, in_flight=self.settings.weight_sync.mode == "in_flight")
        account, use = metrics.TimeAccount(), metrics.EngineUse(max(self.settings.num_engines, 1))

        def save() -> None:
            state = TrainerState(
                step=step, weights_version=versions.highest, prompts=producer.state_dict()
            )
            self.save(learner, state)

        while step < trainer.num_steps:
            if stop.is_set():
                save()
                raise KeyboardInterrupt
            batch = await self.next_batch(llm, producer, account)
            step += 1
            with account.spend("train"):
                # In a thread of its own: this one receives what the engines send meanwhile.
                trained = await asyncio.to_thread(learner.update, batch.rollouts, step)
            with account.spend("update"):
                await weight_sync.apush(learner.policy, versions.reserve())
            producer.refresh_version()  # the engines begin the batches that it allows
            evaluated: dict[str, float] = {}
            interval = trainer.eval_interval
            if interval and step % interval == 0 and step < trainer.num_steps:
                with account.spend("evaluate"):
                    evaluated = await self.evaluate(llm, step)
            stats = await llm.stats()
            rates = metrics.step_metrics(
                account.take(),
                num_generated_tokens=int(batch.rollouts.completion_lengths_B.sum()),
                num_trained_tokens=int(trained["train/num_tokens"]),
            )
            engine = {**stats.as_metrics(), **use.take(stats)}
            rewards = reward_metrics([r for group in batch.groups for r in group.rewards])
            row = {**batch.metrics, **rewards, **trained, **evaluated, **engine, **rates}
            yield step, batch, row
            # After its row is written, so that a resumed run finds one for each step it has done.
            # The time is the next step's.
            if step % trainer.checkpoint_interval == 0 or step == trainer.num_steps:
                with account.spend("checkpoint"):
                    save()

    async def next_batch(
        self,
        llm: ThreadedLLM | AsyncLLM,
        producer: AsyncRolloutProducer,
        account: metrics.TimeAccount,
    ) -> TrainingBatch:
        """Wait for a batch; in flight the engines generate anyway, else for as long as it takes."""
        sync = self.settings.weight_sync
        if sync.mode == "in_flight":
            with account.spend("wait"):
                return await anext(producer)
        with account.spend("generate"):
            async with generation_phase(llm, release=sync.release) as phase:
                batch = await anext(producer)
        account.reassign_phase(phase.timings())
        return batch


if __name__ == "__main__":
    jobs.run_hydra_job(
        run_job,
        JobSettings,
        config_path="pkg://conf",
        config_name="train_grpo",
        shows_config=lambda settings: settings.logger.console,
    )
