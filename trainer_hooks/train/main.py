"""`rollout train`: trains a model by GRPO or a variant on your prompts and rewards, or on the demo.

    rollout train model.path=DIR data=jsonl data.path=train.jsonl reward=mine:score
    rollout train --config-name demo                                # the demo, seed 0
    rollout train --config-name demo resume=auto                    # continue after kill or Ctrl-C
    rollout train --config-name demo run_name=seeds seeds=3         # seeds 0, 1, 2, then a table
    rollout train --config-name demo run_name=async mode=async      # engines in their own processes
    rollout train --config-name demo run_name=ppo algorithm=ppo     # with a critic
    rollout train --config-name demo run_name=sizes --multirun algorithm.group_size=4,8
    torchrun --nproc-per-node 2 -m trainer_hooks.train --config-name demo trainer=fsdp2

Results go to outputs/train/<run_name>/seed_<seed>, which one job at a time can use. If a run starts
over, the previous directory is renamed to seed_<seed>.previous, .previous-2, ... and nothing is
deleted. Files of a run:

- config.yaml (all settings), starts.jsonl (commands and versions), metrics.jsonl (a row per step)
- batches.jsonl (prompts of each step as [epoch, index], and how often each was sampled again)
- completions.jsonl (samples), answers.jsonl (held-out answers of each evaluation)
- checkpoints/, report.html, summary.json, weights_version (the highest version that was used)
- reference/ (the reference policy of a KL term), base/ (the weights from which engines start)
- skipped/ (batches of steps with non-finite gradients)

`trainer_hooks.train.command` reads the command line and calls `run_job`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rollout import LLM, AsyncLLM, ConfigError, InferenceConfig
from rollout.launch.torchrun import serve_engines
from rollout.text import as_tokenizer
from trainer_hooks import (
    AsyncRolloutProducer,
    ReferencePolicy,
    ThreadedLLM,
    TrainerState,
    TrainingBatch,
    WeightsVersionCounter,
    WeightSync,
    find_checkpoint,
    generation_phase,
    metrics,
    read_trainer_state,
)
from trainer_hooks.checkpoint import restore_checkpoints
from trainer_hooks.doctor import BatchFiles
from trainer_hooks.metrics.jsonl import finite
from trainer_hooks.rewards.processes import in_thread
from trainer_hooks.train.adapter import new_adapter
from trainer_hooks.train.config_loading import make_object
from trainer_hooks.train.dashboard import Dashboard, watch, watch_step
from trainer_hooks.train.job import JobSettings
from trainer_hooks.train.learner import Learner, base_weights, follow
from trainer_hooks.train.no_signal import step_warnings
from trainer_hooks.train.report import REPORT_NAME, write_report
from trainer_hooks.train.run_files import (
    begin_directory,
    locked_run,
    open_logger,
    stop_on_interrupt,
    write_config,
)
from trainer_hooks.train.run_results import METRICS_NAME
from trainer_hooks.train.samples import SampleLog
from trainer_hooks.train.settings import TORCHRUN_LAUNCHER
from trainer_hooks.train.summary import (
    answers_table,
    interrupted_text,
    outline,
    print_outline,
    seeds_table,
    shown_path,
    summarise,
    summary_table,
)
from trainer_hooks.train.task import Task, producer_options
from trainer_hooks.train.threads import restored_threads, threads_of, use_threads
from trainer_hooks.train.warm_up import warm_up
from trainer_hooks.weight_sync.trainer_ranks import (
    ALONE,
    TrainerRanks,
    torchrun_place,
    torchrun_ranks,
)

_log = logging.getLogger(__name__)
INTERRUPTED_EXIT_CODE = 130
TRAINING_THREAD = "training step"
NUM_ANSWERS = 2  # held-out prompts whose answers are shown before and after training
WARMUP_COLUMNS = {"warmup/loss": "loss {:.3f}", "warmup/reward": "sampled reward {:.3f}"}


def run_job(settings: JobSettings) -> None:
    """Run the job's seeds on rank 0.

    On other ranks of torchrun, train a part of the policy or run an engine. Raises ConfigError if
    torchrun started several ranks and the settings use only one.
    """
    disable_progress_bar()
    if settings.trainer.strategy == "fsdp2":
        with torchrun_ranks() as ranks:
            if ranks.rank:
                follow(ranks, settings)
                return
            try:
                run_seeds(settings, ranks)
            finally:
                ranks.broadcast(None)
        return
    if settings.launcher.path == TORCHRUN_LAUNCHER:
        if serve_engines(settings.launcher.options.get("folder")):
            return
    elif torchrun_place()[1] > 1:
        raise ConfigError(
            f"torchrun started {torchrun_place()[1]} ranks, and each would be a separate trainer; "
            "choose trainer=fsdp2, or launcher=torchrun to make the other ranks engines"
        )
    run_seeds(settings, ALONE)


def run_seeds(settings: JobSettings, ranks: TrainerRanks) -> None:
    """Run each seed in turn and print a summary table of each run, and of all runs if there are
    several. Ctrl-C ends the process with status INTERRUPTED_EXIT_CODE."""
    console = Console(quiet=not settings.logger.console)
    directory = Path(HydraConfig.get().runtime.output_dir)
    summaries = []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        run_directory = directory / f"seed_{seed}"
        console.print(f"{settings.title}, seed {seed}", style="bold", highlight=False)
        try:
            summaries.append(run_seed(run_directory, settings, seed, ranks))
        except KeyboardInterrupt:
            console.print(interrupted_text(run_directory), highlight=False, soft_wrap=True)
            if (page := run_directory / REPORT_NAME).exists():
                console.print(f"report: {shown_path(page)}", highlight=False, soft_wrap=True)
            exit_interrupted()
        answers = metrics.read_jsonl(run_directory / "answers.jsonl")
        if answers[0]["answers"]:
            console.print(answers_table(answers))
        # The summary comes last, where readers of a terminal look.
        console.print(summary_table(summaries[-1], f"{settings.title}, seed {seed}"))
        for text in summaries[-1][metrics.WARNINGS]:
            console.print(text, style="bold red", highlight=False, soft_wrap=True)
        policy = find_checkpoint(run_directory / "checkpoints")
        for name, path in {"policy": policy, "report": run_directory / REPORT_NAME}.items():
            if path is not None:
                console.print(f"{name}: {shown_path(path)}", highlight=False, soft_wrap=True)
    if len(summaries) > 1:
        console.print(seeds_table(summaries, f"{settings.title}, {len(summaries)} seeds"))
        report = f"report of all seeds: {shown_path(write_report(directory))}"
        console.print(report, highlight=False, soft_wrap=True)


def exit_interrupted() -> NoReturn:
    """End the process with status INTERRUPTED_EXIT_CODE, even while a step is trained."""
    if any(thread.name == TRAINING_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED_EXIT_CODE)  # torch can crash at a normal exit while a thread computes
    sys.exit(INTERRUPTED_EXIT_CODE)


def run_seed(
    directory: Path,
    settings: JobSettings,
    seed: int,
    ranks: TrainerRanks = ALONE,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Run one seed in `directory`: warm-up, evaluation, training, evaluation. Return its summary.

    Writes summary.json, and report.html even after a failure. Raises ConfigError if another job
    runs in `directory`. After Ctrl-C, raises KeyboardInterrupt between two steps. It first writes a
    checkpoint, except during the warm-up.
    """
    with locked_run(directory), restored_threads():
        try:
            run = Run(directory, settings, seed, ranks, clock)
            summary = asyncio.run(run.run())
        finally:
            if (directory / METRICS_NAME).exists():
                write_report(directory)
        (directory / "summary.json").write_text(json.dumps(finite(summary), indent=2) + "\n")
        return summary


class Run:
    """One run of the job: its directory, settings, seed and data, and how to start its parts.

    `clock`: returns seconds, from which step times and the remaining time are computed.
    """

    def __init__(
        self,
        directory: Path,
        settings: JobSettings,
        seed: int,
        ranks: TrainerRanks = ALONE,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.directory, self.settings, self.seed, self.ranks = directory, settings, seed, ranks
        self.clock = clock
        self.checkpoints = directory / "checkpoints"
        self.console = Console(quiet=not settings.logger.console)
        self.task = Task(
            settings.model, settings.data, settings.reward, settings.warmup.source,
            settings.environment, settings.engine.max_sequence_length,
            settings.warmup.answer_column if settings.warmup.max_steps else None,
        )  # fmt: skip
        if num_skipped := self.task.num_skipped_rows:
            self.console.print(f"{num_skipped:,} bad rows are skipped; train.log names some")
        self.prompts = self.task.prompts(seed)
        self.params = settings.algorithm.sampling_params()
        self.threads = threads_of(settings)
        use_threads(self.threads.trainer)
        _log.info("threads: %s", self.threads)
        torch.manual_seed(seed)

    async def run(self) -> dict[str, Any]:
        """Train, then close the reward function and the environments. Return the run's summary."""
        with self.task.reward or nullcontext():
            async with self.task.rollout_fn or nullcontext():
                return await self.train()

    async def train(self) -> dict[str, Any]:
        """Train to the last step and return the summary.

        Continues from the newest checkpoint if the settings ask to resume. Otherwise renames an
        earlier run's directory and begins a new run.
        """
        settings, view = self.settings, Dashboard(self.console, clock=self.clock)
        restore_checkpoints(self.checkpoints)
        checkpoint = find_checkpoint(self.checkpoints) if settings.resume == "auto" else None
        if checkpoint is None:
            begin_directory(self.directory)
        write_config(self.directory, settings)
        step = None if checkpoint is None else read_trainer_state(checkpoint).step
        plan = outline(settings, self.task, len(self.prompts), self.directory, step)
        print_outline(plan, self.console)
        with (
            stop_on_interrupt(view.announce) as stop,
            open_logger(self.directory, settings, view, step) as logger,
        ):
            if checkpoint is None:
                checkpoint = await self.begin(logger, stop)
            else:
                view.recall(metrics.read_jsonl(self.directory / METRICS_NAME))
            await self.train_from(checkpoint, view, logger, stop)
            rows = metrics.read_jsonl(self.directory / METRICS_NAME)
            summary = summarise(rows, self.seed)
            logger.log_summary(summary)
        return summary

    async def train_from(
        self,
        checkpoint: Path,
        view: Dashboard,
        logger: metrics.MetricsLogger,
        stop: threading.Event,
    ) -> None:
        """Load `checkpoint`, start engines and producer, train to the last step, and evaluate. Each
        step adds rows to metrics.jsonl and batches.jsonl, and samples to completions.jsonl."""
        settings = self.settings
        # A new run loads the checkpoint of step 0, so that its random states are those of a resume.
        learner, state = Learner.load(checkpoint, settings, self.ranks)
        versions = WeightsVersionCounter(self.directory / "weights_version", state.weights_version)
        interval, temperature = settings.trainer.checkpoint_interval, self.params.temperature
        batch_files = BatchFiles(self.directory, temperature, interval)
        with (
            closing(metrics.JsonlWriter(self.directory / "batches.jsonl", state.step)) as batches,
            SampleLog(
                self.directory, self.task.tokenizer, settings.logger, view, logger, state.step
            ) as samples,
        ):
            view.start_stage(settings.title, settings.trainer.num_steps)
            view.show_progress(0, 0, "starting the engines")
            async with self.engines(learner, versions) as llm:
                if state.step == 0:
                    logger.log(await self.evaluate(llm, 0, view), step=0, version=0)
                account = metrics.TimeAccount(self.clock)
                async with (
                    self.producer(llm, state) as producer,
                    watch_step(view, llm, producer, account),
                ):
                    training = Training(
                        run=self,
                        learner=learner,
                        llm=llm,
                        producer=producer,
                        versions=versions,
                        account=account,
                    )
                    async for step, batch, row in training.steps(state.step, stop):
                        logger.log(row, step=step, version=batch.version)
                        prompts = [[g.ticket.epoch, g.ticket.index] for g in batch.groups]
                        reissues = [g.num_reissues for g in batch.groups]
                        batches.log(
                            {"trainer/step": step, "prompts": prompts, "num_reissues": reissues}
                        )
                        samples.log(step, batch, learner.advantages_B)
                        if settings.logger.save_batches:
                            batch_files.log(step, batch)
                last = settings.trainer.num_steps
                evaluated = await self.evaluate(llm, last, view)
                logger.log(evaluated, step=last, version=llm.weights_version)
            view.show_progress(0, 0)

    async def evaluate(
        self, llm: ThreadedLLM | AsyncLLM, step: int, view: Dashboard | None = None
    ) -> dict[str, float]:
        """Return `eval/*` metrics of the weights after `step` on held-out prompts. `view` shows the
        progress. Writes NUM_ANSWERS greedy answers to answers.jsonl."""
        sync, wanted = self.settings.weight_sync, self.settings.trainer.evaluation
        num_ended, num_samples = 0, len(self.task.held_out) * (1 + wanted.n)

        def count_sample() -> None:
            nonlocal num_ended
            num_ended += 1

        # The weights stay in memory, because the next batch needs them before any push.
        release = [name for name in sync.release if name != "weights"]
        phase: AbstractAsyncContextManager[Any] = generation_phase(llm, release=release)
        watched: AbstractAsyncContextManager[Any] = nullcontext()
        if view is not None:
            watched = watch(
                view, llm, lambda: view.show_progress(num_ended, num_samples, "evaluate")
            )
        async with nullcontext() if sync.mode == "in_flight" else phase, watched:
            reward = await self.task.evaluate(llm, self.params, wanted, count_sample)
            answers = await self.task.greedy_answers(llm, self.params, NUM_ANSWERS)
        with closing(metrics.JsonlWriter(self.directory / "answers.jsonl", step - 1)) as file:
            file.log({"trainer/step": step, "answers": answers})
        return reward

    async def begin(self, logger: metrics.MetricsLogger, stop: threading.Event) -> Path:
        """Create the policy, warm it up if the settings say so, and write the checkpoint of step 0.
        Return the checkpoint's path. Also writes base/ and reference/ if the run needs them."""
        settings = self.settings
        policy: Any = self.task.new_policy()
        if settings.warmup.max_steps:
            await self.warm_up(policy, logger, stop)
        algorithm, reference = settings.algorithm, None
        if settings.pushes_at_start and (settings.model.path is None or settings.warmup.max_steps):
            policy.save_pretrained(self.directory / "base")
        if (lora := settings.model.lora) is not None:
            policy = new_adapter(base_weights(self.directory, settings.model), lora)
        elif algorithm.needs_reference:
            # A resumed run needs the reference, and old checkpoints are deleted.
            policy.save_pretrained(self.directory / "reference")
            reference = ReferencePolicy.copy_of(policy, algorithm.reference)
        learner = Learner(policy, algorithm, settings.trainer, reference)
        return learner.save(
            self.checkpoints, TrainerState(step=0, weights_version=0), self.task.tokenizer
        )

    async def warm_up(
        self, policy: PreTrainedModel, logger: metrics.MetricsLogger, stop: threading.Event
    ) -> None:
        """Train `policy` on the warm-up's answers and log each step. Raises KeyboardInterrupt after
        the step in which `stop` was set."""
        settings, view = self.settings, metrics.ProgressView(self.console, WARMUP_COLUMNS)
        with logger.shown_by(view):
            view.start_stage("warm-up", settings.warmup.max_steps, "warmup/step")
            stage = settings.warmup, self.params, settings.engine
            async for row in warm_up(policy, self.task, self.seed, *stage):
                logger.log(row, step=0, version=0)
                if stop.is_set():
                    raise KeyboardInterrupt

    @asynccontextmanager
    async def engines(
        self, learner: Learner, versions: WeightsVersionCounter
    ) -> AsyncIterator[ThreadedLLM | AsyncLLM]:
        """Serve the policy during the block, by an engine in this process or by engine
        processes."""
        policy, lora = learner.policy, self.settings.model.lora
        engine, algorithm = self.settings.engine, self.settings.algorithm
        records_routing = engine.record_routing or algorithm.replay_routing
        config = replace(
            engine,
            seed=self.seed,
            record_routing=records_routing,
            num_threads=self.threads.engine,
        )
        version = versions.reserve()
        # Engines get the weights themselves: a checkpoint can be deleted before an engine restarts.
        if self.settings.pushes_at_start:
            policy = base_weights(self.directory, self.settings.model)
        if lora is not None and config.dtype == "auto":
            config = replace(config, dtype="float32")  # the trainer's dtype
        async with self._serving(policy, config, version) as llm:
            if self.settings.pushes_at_start:
                await learner.push(
                    WeightSync(llm, in_flight=True), versions.reserve(),
                    merges_adapter=self.settings.merges_adapter,
                )  # fmt: skip
            yield llm

    @asynccontextmanager
    async def _serving(
        self, policy: Any, config: InferenceConfig, version: int
    ) -> AsyncIterator[ThreadedLLM | AsyncLLM]:
        tokenizer, launcher = self.task.tokenizer, self.settings.launcher
        if num_engines := self.settings.num_engines:
            async with AsyncLLM(
                policy,
                tokenizer,
                config,
                data_parallel_size=num_engines,
                weights_version=version,
                launcher=make_object(launcher.path, launcher.options, "launcher"),
                weight_transport=self.settings.weight_transport,
            ) as llm:
                yield llm
        else:
            with LLM(policy, tokenizer, config, weights_version=version) as direct:
                async with ThreadedLLM(direct) as threaded:
                    yield threaded

    def producer(self, llm: ThreadedLLM | AsyncLLM, state: TrainerState) -> AsyncRolloutProducer:
        """Return the producer of training batches, which resumes the prompts of `state`."""
        algorithm, tokenizer = self.settings.algorithm, self.task.tokenizer
        producer = AsyncRolloutProducer(
            llm,
            self.prompts,
            self.task.reward,
            algorithm.group_size,
            algorithm.groups_per_step,
            rollout_fn=self.task.rollout_fn,
            sampling_params=self.params,
            tokenizer=tokenizer,
            seed=self.seed,
            pad_id=tokenizer.pad_token_id,
            routing=algorithm.replay_routing,
            **producer_options(self.settings.producer),
        )
        if state.prompts:
            producer.load_state_dict(state.prompts)
        return producer


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training loop of a run. `Run.train_from` makes it."""

    run: Run
    learner: Learner
    llm: ThreadedLLM | AsyncLLM
    producer: AsyncRolloutProducer
    versions: WeightsVersionCounter
    account: metrics.TimeAccount

    async def steps(
        self, step: int, stop: threading.Event
    ) -> AsyncIterator[tuple[int, TrainingBatch, dict[str, Any]]]:
        """Train from `step` to the last step. Yield each step's number, batch and metrics.

        Engines generate during training only if weights are synchronised in flight. Saves every
        `checkpoint_interval` steps and after the last one. When `stop` is set, it saves and raises
        KeyboardInterrupt.
        """
        settings, account = self.run.settings, self.account
        trainer = settings.trainer
        weight_sync = WeightSync(self.llm, in_flight=settings.weight_sync.mode == "in_flight")
        use = metrics.EngineUse(max(settings.num_engines, 1), self.run.clock)
        while step < trainer.num_steps:
            if stop.is_set():
                self.save(step)
                raise KeyboardInterrupt
            batch = await self.next_batch()
            step += 1
            trained = await self.train(batch, step)
            with account.spend("update"):
                if "weights" in settings.weight_sync.release:  # a push needs the weights' memory
                    await self.llm.resume(only="weights")
                await self.learner.push(
                    weight_sync, self.versions.reserve(), merges_adapter=settings.merges_adapter
                )
            self.producer.refresh_version()  # lets the engines begin further batches
            evaluated: dict[str, float] = {}
            interval = trainer.eval_interval
            if interval and step % interval == 0 and step < trainer.num_steps:
                with account.spend("evaluate"):
                    evaluated = await self.run.evaluate(self.llm, step)
            stats = await self.llm.stats()
            rates = metrics.step_metrics(
                account.take(),
                num_generated_tokens=int(batch.rollouts.completion_lengths_B.sum()),
                num_trained_tokens=int(trained["train/num_tokens"]),
            )
            engine = {**stats.as_metrics(), **use.take(stats)}
            row = {**batch.metrics, **trained, **evaluated, **engine, **rates}
            yield step, batch, self.with_warnings(step, batch, row)
            # Saved after the row is written, so that a resumed run has a row for each finished
            # step. The time counts towards the next step.
            if step % trainer.checkpoint_interval == 0 or step == trainer.num_steps:
                with account.spend("checkpoint"):
                    self.save(step)

    def with_warnings(
        self, step: int, batch: TrainingBatch, row: dict[str, float]
    ) -> dict[str, Any]:
        """Return the step's row with its `step_warnings`, if any."""
        settings, tokenizer = self.run.settings, as_tokenizer(self.run.task.tokenizer)
        success_reward = settings.trainer.evaluation.success_reward
        found = step_warnings(step, row, batch, settings.algorithm, tokenizer, success_reward)
        return {**row, metrics.WARNINGS: found} if found else row

    async def next_batch(self) -> TrainingBatch:
        """Return the producer's next batch. Unless weights are synchronised in flight, engines run
        only in this call and in evaluations."""
        settings = self.run.settings
        if settings.weight_sync.mode == "in_flight":
            with self.account.spend("wait"):
                return await anext(self.producer)
        release, discards = settings.weight_sync.release, settings.discards_weights
        with self.account.spend("generate"):
            async with generation_phase(
                self.llm, release=release, discard_weights=discards
            ) as phase:
                batch = await anext(self.producer)
        self.account.reassign_phase(phase.timings())
        return batch

    async def train(self, batch: TrainingBatch, step: int) -> dict[str, float]:
        """Train on the batch in a thread and return `train/*` metrics. The producer gets the
        effective sample size, which can change its staleness bound."""

        def update() -> dict[str, float]:
            # An engine in this process can have set another number.
            use_threads(self.run.threads.trainer)
            return self.learner.update(batch.rollouts, step)

        with self.account.spend("train"):
            # The event loop can receive rollouts meanwhile. A second Ctrl-C does not wait for the
            # thread.
            trained = await in_thread(update, TRAINING_THREAD)
        if "train/eff_sample_size" in trained:  # missing if no group had a reward spread
            self.producer.observe_effective_sample_size(trained["train/eff_sample_size"])
        return trained

    def save(self, step: int) -> None:
        """Write a checkpoint of the learner and the producer's prompts after `step`."""
        prompts = self.producer.state_dict()
        state = TrainerState(step=step, weights_version=self.versions.highest, prompts=prompts)
        self.learner.save(self.run.checkpoints, state, self.run.task.tokenizer)
