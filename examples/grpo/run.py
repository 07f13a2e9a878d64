"""One run of the job: its parts, opened and closed together, and its files.

<directory>/metrics.jsonl, checkpoints/step_*/, weights_version, reward_curve.png, summary.json, and
reference/ where the loss has a KL term
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from examples.grpo.interrupt import stop_on_interrupt
from examples.grpo.learner import GrpoLearner
from examples.grpo.policy import build_policy, build_tokenizer
from examples.grpo.sampler import GroupSampler
from examples.grpo.settings import JobSettings
from examples.grpo.task import PalindromeTask, ProblemStream
from rollout import LLM, InferenceConfig
from trainer_hooks import (
    GenerationPhase,
    InProcessWeightSync,
    MetricsLogger,
    TrainerState,
    find_checkpoint,
    generation_phase,
    load_checkpoint,
    save_checkpoint,
)
from trainer_hooks.hydra_job import wandb_names
from trainer_hooks.metrics import DEFAULT_COLUMNS, ProgressView, start_wandb_run
from trainer_hooks.metrics.logger import MetricsView
from trainer_hooks.version_counter import WeightsVersionCounter

VIEW_COLUMNS = {
    "warmup/loss": "loss {:.3f}",
    "warmup/reward": "sampled reward {:.3f}",
    **DEFAULT_COLUMNS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parts of a run; `start_step` training steps were done when it was opened."""

    directory: Path
    settings: JobSettings
    start_step: int
    is_resumed: bool
    task: PalindromeTask
    tokenizer: PreTrainedTokenizerFast
    policy: PreTrainedModel
    learner: GrpoLearner
    llm: LLM
    stream: ProblemStream
    sampler: GroupSampler
    versions: WeightsVersionCounter
    logger: MetricsLogger
    view: ProgressView
    stop: threading.Event  # set by Ctrl-C: end at the next step edge

    def phase(self) -> GenerationPhase:
        """A generation phase under the policy's present weights, as a new version."""
        return generation_phase(
            self.llm, InProcessWeightSync(self.llm), self.policy, self.versions.reserve()
        )

    def save(self, step: int) -> Path:
        """Write the checkpoint of a run that has done `step` training steps."""
        state = TrainerState(
            step=step, weights_version=self.versions.highest, prompts=self.sampler.state_dict()
        )
        return save_checkpoint(
            self.directory / "checkpoints",
            state,
            self.policy,
            self.learner.optimizer,
            self.tokenizer,
        )


@contextmanager
def open_run(directory: Path, settings: JobSettings, seed: int) -> Iterator[Run]:
    """Build everything of the run with `seed`, from its newest checkpoint if it may be resumed."""
    checkpoint = find_checkpoint(directory / "checkpoints") if settings.resume == "auto" else None
    if checkpoint is None:
        set_aside(directory)
    torch.manual_seed(seed)
    torch.set_num_threads(settings.trainer.num_threads)
    task = PalindromeTask(settings.task)
    tokenizer = build_tokenizer(task.constant_parts)
    if checkpoint is None:
        policy = build_policy(settings.model, tokenizer)
    else:
        policy = AutoModelForCausalLM.from_pretrained(checkpoint)
    learner = GrpoLearner(policy, settings.algorithm, settings.trainer)
    state = TrainerState(step=0, weights_version=0)
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, learner.optimizer)
    versions = WeightsVersionCounter(directory / "weights_version", floor=state.weights_version)
    view = ProgressView(Console(quiet=not settings.logger.console), VIEW_COLUMNS)
    resume_step = None if checkpoint is None else state.step
    with (
        stop_on_interrupt() as stop,
        open_logger(directory, settings, view, resume_step) as logger,
        LLM(
            policy,
            inference_config=engine_config(settings, logger, seed, state.step),
            weights_version=versions.reserve(),
        ) as llm,
    ):
        stream = ProblemStream(task, seed, **state.prompts)
        yield Run(
            directory=directory,
            settings=settings,
            start_step=state.step,
            is_resumed=checkpoint is not None,
            task=task,
            tokenizer=tokenizer,
            policy=policy,
            learner=learner,
            llm=llm,
            stream=stream,
            sampler=GroupSampler(llm, stream, tokenizer, settings.algorithm),
            versions=versions,
            logger=logger,
            view=view,
            stop=stop,
        )


def engine_config(
    settings: JobSettings, logger: MetricsLogger, seed: int, step: int
) -> InferenceConfig:
    """The engine group, with the run's own noise and, if the engine is to log, the run's logger."""
    interval = settings.logger.engine_step_interval
    return replace(
        settings.engine,
        # Other noise after a restart: the engine counts its submissions from 0 again.
        seed=seed * 1_000_000 + step,
        metrics_writer=logger if interval else None,
        logging_step_interval=interval,
    )


def open_logger(
    directory: Path, settings: JobSettings, view: MetricsView, resume_step: int | None
) -> MetricsLogger:
    """The run's metrics.jsonl, its view and, if wanted, its wandb run."""
    wandb_run = None
    if settings.logger.wandb != "off":
        name, group = wandb_names(settings.run_name, directory.name)
        wandb_run = start_wandb_run(
            project=settings.logger.wandb_project,
            name=name,
            group=group,
            directory=directory,
            config=asdict(settings),
            mode=settings.logger.wandb,
            resume=resume_step is not None,
        )
    return MetricsLogger(
        jsonl=directory / "metrics.jsonl", wandb=wandb_run, console=view, resume_step=resume_step
    )


def set_aside(directory: Path) -> None:
    """Rename what an earlier run left in `directory` to <directory>.previous, which is replaced."""
    previous = directory.with_name(f"{directory.name}.previous")
    if directory.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(directory, previous)
    directory.mkdir(parents=True)
