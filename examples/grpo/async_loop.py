"""The asynchronous loop: engines generate the next batches while this one is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from examples.grpo.async_run import AsyncRun, MakeLearner, open_async_run, training_params
from examples.grpo.settings import JobSettings
from rollout import SamplingParams
from trainer_hooks.evaluate import evaluate
from trainer_hooks.metrics import rollout_metrics, step_metrics
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.producer import TrainingBatch
from trainer_hooks.prompt_item import PromptItem


async def train_async(run: AsyncRun) -> None:
    """Train until the last step. Raises KeyboardInterrupt, with a checkpoint, if told to."""
    settings, step = run.settings, run.start_step
    run.view.start_stage(
        f"{settings.algorithm.loss.kind.upper()}, async", settings.trainer.num_steps
    )
    while step < settings.trainer.num_steps:
        if run.stop.is_set():
            run.save(step)
            raise KeyboardInterrupt
        with run.account.spend("wait"):
            batch = await anext(run.producer)
        step += 1
        async with weights_of(run):
            with run.account.spend("train"):
                # In a thread of its own: this one takes in what the engines send meanwhile.
                trained = await asyncio.to_thread(run.learner.update, batch.rollouts, step)
        with run.account.spend("wait"):
            stats = await run.llm.stats()
        metrics = {
            **rollout_metrics(
                batch.rollouts, batch.group_size, finish_reasons=finish_reasons(batch)
            ),
            **batch.metrics,
            **trained,
            **stats.as_metrics(),
            **run.engine_use.take(stats),
            **step_metrics(
                run.account.take(),
                num_generated_tokens=int(batch.rollouts.completion_lengths_B.sum()),
                num_trained_tokens=int(trained["train/num_tokens"]),
            ),
        }
        run.logger.log(metrics, step=step, version=batch.version)
        prompts = [[group.ticket.epoch, group.ticket.index] for group in batch.groups]
        run.batches.log({TRAINER_STEP: step, "prompts": prompts})
        # After its rows, so that a resumed run finds those of every step that it has done; the time
        # is the next step's.
        if step % settings.trainer.checkpoint_interval == 0 or step == settings.trainer.num_steps:
            with run.account.spend("checkpoint"):
                run.save(step)


def finish_reasons(batch: TrainingBatch) -> list[str | None]:
    """Of each rollout's last turn."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    return [rollout.requests[-1].finish_reason for rollout in rollouts]


@asynccontextmanager
async def weights_of(run: AsyncRun) -> AsyncIterator[None]:
    """Around a training step: afterwards the engines serve what it made, as a new version.

    In flight they generate all the time; else they are suspended while the trainer trains.
    """
    suspends, account = run.settings.weight_sync.mode == "suspend", run.account
    if suspends:
        with account.spend("suspend"):
            await run.llm.pause()
            await run.llm.suspend(release=run.settings.weight_sync.release)
    yield
    with account.spend("update"):
        await run.weight_sync.apush(run.learner.policy, run.versions.reserve())
    if suspends:
        with account.spend("resume"):
            await run.llm.resume()
            await run.llm.unpause()
    run.producer.note_version()


async def run_async(
    directory: Path, settings: JobSettings, seed: int, make_learner: MakeLearner
) -> None:
    """One run, from its newest checkpoint if it may go on, to its last step and evaluation."""
    async with open_async_run(directory, settings, seed, make_learner) as run:
        await train_async(run)
        reward = await greedy_reward_async(run)
        version, step = run.llm.weights_version, settings.trainer.num_steps
        run.logger.log({"eval/greedy_reward": reward}, step=step, version=version)


async def greedy_reward_async(run: AsyncRun) -> float:
    """Mean reward of greedy answers to the held-out problems, under the present weights."""
    params: SamplingParams = training_params(run.settings, run.tokenizer)
    metrics = await evaluate(
        run.llm,
        [PromptItem(p.question, {"entry": p.entry}) for p in run.task.held_out],
        run.task.reward,
        SamplingParams(
            temperature=0.0,
            num_tokens_to_generate=params.num_tokens_to_generate,
            termination_id=params.termination_id,
        ),
        tokenizer=run.tokenizer,
    )
    return metrics["eval/reward"]
