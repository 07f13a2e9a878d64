"""A run whose engines work in processes of their own while the trainer trains: its parts."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from examples.grpo.evaluate import greedy_reward
from examples.grpo.interrupt import stop_on_interrupt
from examples.grpo.reference import save_reference
from examples.grpo.run import open_logger, open_run
from examples.grpo.settings import JobSettings
from examples.grpo.task import PalindromeTask, ProblemStream
from examples.grpo.warmup import warm_up
from rollout import AsyncLLM, SamplingParams
from trainer_hooks import (
    MetricsLogger,
    RolloutBatch,
    SharedMemoryWeightSync,
    TrainerState,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from trainer_hooks.checkpoint import read_trainer_state
from trainer_hooks.metrics import Dashboard, EngineUse, JsonlWriter, TimeAccount
from trainer_hooks.producer import AsyncRolloutProducer
from trainer_hooks.prompt_item import PromptItem
from trainer_hooks.version_counter import WeightsVersionCounter


class Learner(Protocol):
    """Changes `policy` in place; `saved` is what a checkpoint holds of it, policy included."""

    policy: Any
    saved: Any
    optimizer: torch.optim.Optimizer

    def update(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """One training step; returns `train/*` metrics."""
        ...


# Makes the learner of a policy; the path is the checkpoint it came from.
MakeLearner = Callable[[Any, JobSettings, Path], Learner]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRun:
    """The parts of a run; `start_step` training steps were done when it was opened."""

    directory: Path
    settings: JobSettings
    start_step: int
    task: PalindromeTask
    tokenizer: PreTrainedTokenizerFast
    learner: Learner
    llm: AsyncLLM
    producer: AsyncRolloutProducer
    weight_sync: SharedMemoryWeightSync
    first_problem: int
    versions: WeightsVersionCounter
    account: TimeAccount
    engine_use: EngineUse
    logger: MetricsLogger
    batches: JsonlWriter  # which prompts each step was trained on
    view: Dashboard
    stop: threading.Event  # set by Ctrl-C: end at the next step edge

    def save(self, step: int) -> Path:
        """Write the checkpoint of a run that has done `step` training steps."""
        prompts = {"position": self.first_problem, "ledger": self.producer.state_dict()}
        state = TrainerState(step=step, weights_version=self.versions.highest, prompts=prompts)
        root = self.directory / "checkpoints"
        return save_checkpoint(
            root, state, self.learner.saved, self.learner.optimizer, self.tokenizer
        )


@asynccontextmanager
async def open_async_run(
    directory: Path, settings: JobSettings, seed: int, make_learner: MakeLearner
) -> AsyncIterator[AsyncRun]:
    """Open the run at its newest checkpoint; one that has none is warmed up in this process first.

    Beside metrics.jsonl it leaves batches.jsonl: the prompts of each step, as [epoch, index].

    The engines' processes end with it, whatever ends it.
    """
    checkpoint, learner, state = _resume(directory, settings, seed, make_learner)
    versions = WeightsVersionCounter(directory / "weights_version", floor=state.weights_version)
    task, tokenizer = PalindromeTask(settings.task), AutoTokenizer.from_pretrained(checkpoint)
    first_problem = state.prompts["position"]
    view = Dashboard(Console(quiet=not settings.logger.console))
    engine = replace(settings.engine, seed=seed, metrics_writer=None, logging_step_interval=0)
    with (
        stop_on_interrupt() as stop,
        open_logger(directory, settings, view, resume_step=state.step) as logger,
        closing(JsonlWriter(directory / "batches.jsonl", resume_step=state.step)) as batches,
    ):
        async with AsyncLLM(
            checkpoint,
            inference_config=engine,
            data_parallel_size=settings.num_engines,
            weights_version=versions.reserve(),
        ) as llm:
            producer = make_producer(
                llm, settings, seed, task, tokenizer, problems(task, settings, seed, first_problem)
            )
            if "ledger" in state.prompts:
                producer.load_state_dict(state.prompts["ledger"])
            async with producer:
                yield AsyncRun(
                    directory=directory,
                    settings=settings,
                    start_step=state.step,
                    task=task,
                    tokenizer=tokenizer,
                    learner=learner,
                    llm=llm,
                    producer=producer,
                    weight_sync=SharedMemoryWeightSync(
                        llm, in_flight=settings.weight_sync.mode == "in_flight"
                    ),
                    first_problem=first_problem,
                    versions=versions,
                    account=TimeAccount(),
                    engine_use=EngineUse(settings.num_engines),
                    logger=logger,
                    batches=batches,
                    view=view,
                    stop=stop,
                )


def _resume(
    directory: Path, settings: JobSettings, seed: int, make_learner: MakeLearner
) -> tuple[Path, Learner, TrainerState]:
    """The newest checkpoint, with its learner and state; a run that has none is begun first."""
    root = directory / "checkpoints"
    if settings.resume != "auto" or find_checkpoint(root) is None:
        _begin(directory, settings, seed)
    checkpoint = find_checkpoint(root)
    assert checkpoint is not None, "a run that was begun has one"
    torch.set_num_threads(settings.trainer.num_threads)
    torch.manual_seed(seed)
    learner = make_learner(AutoModelForCausalLM.from_pretrained(checkpoint), settings, checkpoint)
    state = read_trainer_state(checkpoint)
    if state.step:  # before the first step the optimizer is a new one, of whatever learner
        load_checkpoint(checkpoint, learner.optimizer)
    return checkpoint, learner, state


def _begin(directory: Path, settings: JobSettings, seed: int) -> None:
    """Warm up with an engine in this process, and leave the checkpoint of step 0."""
    with open_run(directory, replace(settings, resume="never"), seed) as run:
        warm_up(run)
        save_reference(run.policy, directory, settings.algorithm.loss)
        reward = greedy_reward(run)
        run.logger.log({"eval/greedy_reward": reward}, step=0, version=run.llm.weights_version)
        run.save(step=0)


def problems(
    task: PalindromeTask, settings: JobSettings, seed: int, position: int
) -> list[PromptItem]:
    """All training prompts of a run, after those that the warm-up used."""
    count = settings.trainer.num_steps * settings.algorithm.groups_per_step
    stream = ProblemStream(task, seed, position=position)
    return [PromptItem(p.question, {"entry": p.entry}) for p in stream.take(count)]


def make_producer(
    llm: AsyncLLM,
    settings: JobSettings,
    seed: int,
    task: PalindromeTask,
    tokenizer: PreTrainedTokenizerFast,
    items: Sequence[PromptItem],
) -> AsyncRolloutProducer:
    """The producer group of the config, on this task."""
    own, algorithm = settings.producer, settings.algorithm

    return AsyncRolloutProducer(
        llm,
        items,
        task.reward,
        algorithm.group_size,
        algorithm.groups_per_step,
        own.max_staleness_versions,
        sampling_params=training_params(settings, tokenizer),
        tokenizer=tokenizer,
        seed=seed,
        shuffle=own.shuffle,
        num_epochs=own.num_epochs,
        min_valid_samples=own.min_valid_samples,
        max_attempts=own.max_attempts,
        oversample_groups=own.oversample_groups,
        drop_zero_variance=own.drop_zero_variance,
        max_refills=own.max_refills,
        version_timeout_s=own.version_timeout_s,
        pad_id=tokenizer.pad_token_id,
    )


def training_params(settings: JobSettings, tokenizer: PreTrainedTokenizerFast) -> SamplingParams:
    """With the log-probs that the loss corrects by."""
    return SamplingParams(
        temperature=settings.algorithm.temperature,
        num_tokens_to_generate=settings.algorithm.max_new_tokens,
        termination_id=tokenizer.eos_token_id,
        return_log_probs=True,
        logprobs_mode="temperature",
    )
