"""The GRPO loop: generate, score, learn, and generate on under the new weights."""

from __future__ import annotations

import time

from examples.grpo.evaluate import rewards_of
from examples.grpo.run import Run
from trainer_hooks import collate_rollouts
from trainer_hooks.metrics import rollout_metrics, timing_metrics


def train(run: Run) -> None:
    """Train until the last step. Raises KeyboardInterrupt, with a checkpoint written, if told to.

    A step is trained at the version its phase ran under. Groups left unfinished by a phase hold
    tokens of older versions when a later one finishes them: those are the stale tokens.
    """
    settings, step = run.settings, run.start_step
    run.view.start_stage("GRPO", settings.trainer.num_steps)
    while step < settings.trainer.num_steps:
        if run.stop.is_set():
            run.save(step)
            raise KeyboardInterrupt
        with run.phase() as phase:
            groups = run.sampler.collect()
        train_start_s = time.perf_counter()
        requests = [request for group in groups for request in group.requests]
        problems = [group.problem for group in groups for _ in group.requests]
        batch = collate_rollouts(
            requests,
            rewards_of(run, problems, requests),
            train_version=run.llm.weights_version,
            temperature=settings.algorithm.temperature,
            pad_id=run.tokenizer.pad_token_id,
        )
        step += 1
        train_metrics = run.learner.update(batch, step)
        train_s = time.perf_counter() - train_start_s
        metrics = {
            **rollout_metrics(
                batch,
                settings.algorithm.group_size,
                finish_reasons=[request.finish_reason for request in requests],
            ),
            **train_metrics,
            **timing_metrics(phase.timings(), train_s, int(batch.completion_lengths_B.sum())),
            **run.llm.stats().as_metrics(),
        }
        run.logger.log(metrics, step=step, version=batch.train_version)
        if step % settings.trainer.checkpoint_interval == 0 or step == settings.trainer.num_steps:
            run.save(step)
