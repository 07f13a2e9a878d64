"""Reward functions that compare a completion with the column `answer`, exactly or by edit distance.

Used by users' training loops, and by conf/reward/text_match.yaml, which names them by path.
"""

from __future__ import annotations

from collections.abc import Sequence


def exact_match_reward(
    completions: Sequence[str], answer: Sequence[str], is_truncated: Sequence[bool]
) -> list[float]:
    """Return 1 for a completion that equals its answer, apart from surrounding white space, else 0.

    A truncated completion gets 0.
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


def similarity(first: str, second: str) -> float:
    """Return 1 - Levenshtein distance / length of the longer text; 1 for two empty texts."""
    longest = max(len(first), len(second))
    return 1.0 - edit_distance(first, second) / longest if longest else 1.0


def edit_distance(first: str, second: str) -> int:
    """Return the least number of insertions, deletions and replacements from one to the other.

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
