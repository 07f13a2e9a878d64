"""A short supervised warm-up: GRPO needs some right answers among the samples to begin with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.grpo.evaluate import mean_reward
from examples.grpo.run import Run
from examples.grpo.settings import WarmupSettings
from examples.grpo.task import Problem, ProblemStream
from rollout.errors import RolloutError

IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmupStep:
    """`reward`: the mean sampled reward after this step, None where it was not measured."""

    step: int
    loss: float
    reward: float | None


def warm_up(run: Run) -> None:
    """Train on the dataset's answers until sampled ones score the target reward.

    Raises RolloutError if `max_steps` do not get there, KeyboardInterrupt if told to stop.
    """
    settings = run.settings.warmup

    def sampled_reward() -> float:
        with run.phase():
            return mean_reward(run, run.stream.take(settings.check_prompts), run.sampler.params)

    run.view.start_stage("warm-up", settings.max_steps, "warmup/step")
    start_s = time.perf_counter()
    for done in supervise(run.policy, run.tokenizer, run.stream, settings, sampled_reward):
        row = {"warmup/step": done.step, "warmup/loss": done.loss}
        if done.reward is not None:
            row["warmup/reward"] = done.reward
        row["timing_s/warmup"] = time.perf_counter() - start_s
        run.logger.log(row, step=0, version=run.llm.weights_version)
        if run.stop.is_set():
            raise KeyboardInterrupt


def supervise(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    stream: ProblemStream,
    settings: WarmupSettings,
    sampled_reward: Callable[[], float],
) -> Iterator[WarmupStep]:
    """Supervised steps until `sampled_reward()` is at least `settings.target_reward`.

    It is measured at the intervals that the settings name, and after the last step. Raises
    RolloutError if `max_steps` do not get there.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate)
    latest = -math.inf
    for step in range(1, settings.max_steps + 1):
        loss = answer_loss(policy, tokenizer, stream.take(settings.batch_size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reward = None
        is_due = step >= settings.first_check and step % settings.check_interval == 0
        if is_due or step == settings.max_steps:
            reward = latest = sampled_reward()
        yield WarmupStep(step, loss.item(), reward)
        if latest >= settings.target_reward:
            return
    raise RolloutError(
        f"the warm-up reached a sampled reward of {latest:.3f} in {settings.max_steps} steps, not "
        f"warmup.target_reward={settings.target_reward}; raise warmup.max_steps or lower the target"
    )


def answer_loss(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens, the end token included, given their questions.

    Shape letters: B problems, T positions, V vocabulary.
    """
    questions = [tokenizer.encode(problem.question) for problem in problems]
    answers = [[*tokenizer.encode(problem.answer), tokenizer.eos_token_id] for problem in problems]
    num_positions = max(map(len, questions)) + max(map(len, answers))
    tokens_BT = torch.full((len(problems), num_positions), tokenizer.pad_token_id)
    targets_BT = torch.full((len(problems), num_positions), IGNORED)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        end = len(question) + len(answer)
        tokens_BT[row, :end] = torch.tensor(question + answer)
        targets_BT[row, len(question) : end] = torch.tensor(answer)
    # Padding is on the right, where no token of a causal model attends to it.
    logits_BTV = policy(input_ids=tokens_BT[:, :-1]).logits
    return cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=IGNORED
    )
