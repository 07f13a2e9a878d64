"""Rewards of what the engine generated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import cast

from examples.grpo.run import Run
from examples.grpo.task import Problem
from rollout import DynamicInferenceRequest, SamplingParams


def rewards_of(
    run: Run, problems: Sequence[Problem], requests: Sequence[DynamicInferenceRequest]
) -> list[float | None]:
    """The reward of each request, which answers the problem at its place."""
    completion_ids = [request.generated_tokens for request in requests]
    return run.task.reward(
        [problem.question for problem in problems],
        run.tokenizer.batch_decode(completion_ids, skip_special_tokens=True),
        completion_ids,
        [problem.entry for problem in problems],
    )


def mean_reward(run: Run, problems: Sequence[Problem], params: SamplingParams) -> float:
    """Mean reward of one answer to each problem, of those that did not fail; NaN if all did."""
    prompts = [run.tokenizer.encode(problem.question) for problem in problems]
    requests = cast(list[DynamicInferenceRequest], run.llm.generate(prompts, params))
    rewards = rewards_of(run, problems, requests)
    scored = [reward for reward in rewards if reward is not None]
    return fmean(scored) if scored else math.nan


def greedy_reward(run: Run) -> float:
    """Mean reward of greedy answers to the held-out problems, under the present weights."""
    params = SamplingParams(
        temperature=0.0,
        num_tokens_to_generate=run.settings.algorithm.max_new_tokens,
        termination_id=run.tokenizer.eos_token_id,
    )
    with run.phase():
        return mean_reward(run, run.task.held_out, params)
