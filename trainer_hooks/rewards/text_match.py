"""Reward functions that compare a completion with the column `answer`, as texts or as numbers.

Used by users' training loops, and by configs such as conf/reward/text_match.yaml, which name them
by path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated

from rollout.errors import ConfigError
from rollout.ranges import Interval, check_value

# A minus behind a letter or a digit, as in "5-3", is no sign. The exponent is short, so that every
# number has a Decimal.
_SIGN, _EXPONENT = r"(?:(?<!\w)[-\u2212])?", r"(?:[eE][+-]?\d{1,3}(?!\d))?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_FRACTION = r"(?<![\w.])\.\d+"  # a number such as .5, but no part of "1.2.5" or "wait...5"
_NUMBER = re.compile(f"{_SIGN}(?:{_DIGITS}|{_FRACTION}){_EXPONENT}", re.ASCII)
_PartialCredit = Annotated[float, Interval(0.0, 1.0, is_high_open=True)]


def exact_match_reward(
    completions: Sequence[str], answer: Sequence[str], is_truncated: Sequence[bool]
) -> list[float]:
    """Return 1 for a completion that equals its answer, else 0. A truncated completion gets 0.

    White space around both texts is ignored.
    """
    rows = zip(completions, answer, is_truncated, strict=True)
    return [float(not cut and text.strip() == right.strip()) for text, right, cut in rows]


def edit_similarity_reward(
    completions: Sequence[str], answer: Sequence[str], is_truncated: Sequence[bool]
) -> list[float]:
    """Return 1 - edit distance / length of the longer text, in [0, 1], for each completion.

    White space around both texts is ignored. A truncated completion gets 0, so that the policy
    learns to end.
    """
    rows = zip(completions, answer, is_truncated, strict=True)
    return [0.0 if cut else similarity(text.strip(), right.strip()) for text, right, cut in rows]


class NumberReward:
    """A reward function for answers that are numbers, with partial credit for near ones.

    For x, the last number in the completion, and y, the last number in the column `answer`:

        reward = 1                                                       if x = y
        reward = partial_credit * max(0, 1 - |x - y| / max(|x|, |y|))    otherwise

    A completion without a number gets 0. A truncated completion gets 0, so that the policy learns
    to end. Numbers may have a sign, commas between thousands, decimals and an exponent. For
    example, 1,700 equals 1.7e3.

    The partial credit spreads the rewards of a group whose answers are all wrong. Without partial
    credit, a small model that is rarely right has nothing to learn from.

    partial_credit: upper bound of a wrong answer's reward, in [0, 1). With 0 only right answers are
        rewarded.

    Raises ConfigError for a `partial_credit` out of range.
    """

    def __init__(self, partial_credit: float = 0.5) -> None:
        self._partial_credit: float = check_value(
            "partial_credit", partial_credit, _PartialCredit, ConfigError
        )

    def __call__(
        self,
        completions: Sequence[str],
        answer: Sequence[str | float],
        is_truncated: Sequence[bool],
    ) -> list[float]:
        """Return rewards in [0, 1]. Raises ConfigError for an answer without a number."""
        rows = zip(completions, answer, is_truncated, strict=True)
        return [0.0 if cut else self._score(text, wanted) for text, wanted, cut in rows]

    def _score(self, completion: str, answer: str | float) -> float:
        given, wanted = last_number(completion), last_number(str(answer))
        if wanted is None:
            raise ConfigError(
                f"answer={answer!r} has no number; mend the row, or choose another reward, such "
                "as trainer_hooks.rewards:exact_match_reward"
            )
        if given is None or given == wanted:
            return float(given is not None)
        return self._partial_credit * _closeness(float(given), float(wanted))


def last_number(text: str) -> Decimal | None:
    """Return the last number in `text`, or None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def _closeness(x: float, y: float) -> float:
    largest = max(abs(x), abs(y))
    return max(0.0, 1.0 - abs(x - y) / largest) if 0.0 < largest < math.inf else 0.0


def similarity(first: str, second: str) -> float:
    """Return 1 - Levenshtein distance / length of the longer text. Two empty texts have 1."""
    longest = max(len(first), len(second))
    return 1.0 - edit_distance(first, second) / longest if longest else 1.0


def edit_distance(first: str, second: str) -> int:
    """Return the least number of insertions, deletions and replacements between two texts.

    Source: Wagner and Fischer 1974, "The String-to-String Correction Problem".
    """
    costs = list(range(len(second) + 1))
    for i, one in enumerate(first, 1):
        diagonal, costs[0] = costs[0], i
        for j, other in enumerate(second, 1):
            replaced = diagonal + (one != other)
            diagonal = costs[j]
            costs[j] = min(replaced, costs[j] + 1, costs[j - 1] + 1)
    return costs[-1]
