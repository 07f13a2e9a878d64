"""Ready-made reward functions: length, format, and the verifiers of reasoning-gym.

Used by users' training loops, by examples/train_trl.py, and by the configs of conf/reward, which
name them by path. The functions keep no state and write nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rollout.errors import ConfigError
from trainer_hooks.losses.advantages import overlong_penalties

# <think>, reasoning, </think>, then an answer: the format of TRL's think_format_reward.
THINK_FORMAT = r"\s*<think>(?!.*<think>).*?</think>.*"


class LengthReward:
    """A reward function that penalises long completions.

    The reward is 0 up to `max_tokens` - `buffer_tokens` tokens, then falls linearly to -1 at
    `max_tokens` and stays there.
    Source: DAPO, "soft overlong punishment" (Yu et al. 2025), arXiv 2503.14476, eq. 13.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int) -> None:
        self._max_tokens, self._buffer_tokens = max_tokens, buffer_tokens

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one number in [-1, 0] per completion."""
        lengths_B = torch.tensor([len(ids) for ids in completion_ids])
        penalties_B = overlong_penalties(lengths_B, self._max_tokens, self._buffer_tokens)
        return [float(penalty) for penalty in penalties_B]


class FormatReward:
    """A reward function that returns 1 for a completion that matches `pattern` as a whole, else 0.

    A dot in the pattern also matches a line break. Raises ConfigError for a pattern that is not a
    regular expression.
    """

    def __init__(self, pattern: str = THINK_FORMAT) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"pattern={pattern!r} is not a regular expression: {error}"
            ) from error

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [float(self._pattern.fullmatch(text) is not None) for text in completions]


def reasoning_gym_reward(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    entry: Sequence[Mapping[str, Any]],
) -> list[float | None]:
    """Return the score of each completion by the verifier of its reasoning-gym dataset, in [0, 1].

    `entry`: column of reasoning-gym entries, whose metadata names the dataset.
    A completion without tokens has the score None. Raises ConfigError if reasoning-gym is not
    installed.
    """
    return [
        _verifier(own["metadata"]["source_dataset"])(completion, entry=own) if ids else None
        for completion, ids, own in zip(completions, completion_ids, entry, strict=True)
    ]


@functools.cache
def _verifier(dataset: str) -> Callable[..., float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise ConfigError(
            "reasoning-gym's rewards need the package: pip install reasoning-gym (extra 'data')"
        ) from error
    verifier: Callable[..., float] = get_score_answer_fn(dataset)
    return verifier
