"""Reward functions that a spawned process can import."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any


def lengths(completions: Sequence[str], **columns: Any) -> list[float]:
    """Return lengths, naming only one argument, as in TRL."""
    return [float(len(completion)) for completion in completions]


def matches(
    prompts: Sequence[str],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
) -> list[float | None]:
    """1 for the answer, nothing for an empty completion."""
    return [
        None if not completion else float(completion == wanted)
        for completion, wanted in zip(completions, answer, strict=True)
    ]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object
) -> float:
    """verl's convention: 1 for an answer of the right length."""
    return float(len(solution_str) == len(ground_truth))


def unruly(completions: Sequence[str]) -> list[float]:
    """Return, raise, exit or hang, as the completion says."""
    for completion in completions:
        if completion == "die":
            os._exit(3)
        if completion == "hang":
            time.sleep(600)
        if completion == "raise":
            raise RuntimeError("told to")
    return [float(os.getpid()) for _ in completions]


def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
    """Return a score in verl's convention, or None for an empty solution."""
    if data_source == "detailed":
        return {"score": solution_str == ground_truth, "length": len(solution_str)}
    return float(solution_str.index(ground_truth))


def misspelled(completions: Sequence[str]) -> list[float]:
    """Raise for a typo, as users make them."""
    return [float(lenght(each)) for each in completions]  # type: ignore[name-defined] # noqa: F821


def waits_for_file(completions: Sequence[str]) -> list[float]:
    """Return 1 once the file named by the completion exists."""
    while not all(map(os.path.exists, completions)):
        time.sleep(0.01)
    return [1.0] * len(completions)
