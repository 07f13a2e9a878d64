"""The task: letters in, a palindrome of them out, judged by reasoning-gym's own verifier."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import reasoning_gym

from examples.grpo.settings import TaskSettings

# Items a run may draw: far more than any run needs, so that runs of other seeds share none.
ITEMS_PER_SEED = 1_000_000
MAX_SEEDS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One item of the dataset; `entry` is what its verifier wants. Held out if `index` < 0."""

    index: int
    question: str
    answer: str
    entry: Mapping[str, Any]


class PalindromeTask:
    """Disjoint parts of one large dataset, and its reward.

    reasoning-gym draws item i of a dataset with seed s from seed s + i, so two datasets with nearby
    seeds share items: there is one dataset here, cut into index ranges. The first `num_held_out`
    items are for evaluation; training never sees their letters, in whatever order.
    """

    def __init__(self, settings: TaskSettings) -> None:
        self._dataset = reasoning_gym.create_dataset(
            "palindrome_generation",
            min_length=settings.min_length,
            max_length=settings.max_length,
            seed=settings.dataset_seed,
            size=settings.num_held_out + MAX_SEEDS * ITEMS_PER_SEED,
        )
        # The held-out items come first in the dataset and have indices below 0 here.
        self._num_held_out = settings.num_held_out
        self.held_out = [self._problem(index) for index in range(-settings.num_held_out, 0)]
        self._held_out_letters = {_letters(problem) for problem in self.held_out}

    def training_problem(self, index: int) -> Problem | None:
        """Training item `index`; None if it has the letters of a held-out one."""
        problem = self._problem(index)
        return None if _letters(problem) in self._held_out_letters else problem

    def reward(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        entry: Sequence[Mapping[str, Any]],
    ) -> list[float | None]:
        """The verifier's score of each completion, in [0, 1]; None where nothing was generated.

        `entry`: of each one's problem, under the name of the prompts' column.
        """
        return [
            self._dataset.score_answer(completion, entry=own) if ids else None
            for completion, ids, own in zip(completions, completion_ids, entry, strict=True)
        ]

    @property
    def constant_parts(self) -> tuple[str, str]:
        """The instruction before the letters of every question, and what separates the letters."""
        problem = self.held_out[0]
        separator = ", "
        instruction, _, _ = problem.question.partition(separator.join(_given_letters(problem)))
        return instruction, separator

    def _problem(self, index: int) -> Problem:
        entry = self._dataset[self._num_held_out + index]
        return Problem(index=index, question=entry["question"], answer=entry["answer"], entry=entry)


class ProblemStream:
    """The training problems of one run, in order.

    `position`: where to go on. `unfinished`: indices given out before and to be given out again
    first, as a killed run leaves them.
    """

    def __init__(
        self, task: PalindromeTask, seed: int, position: int = 0, unfinished: Sequence[int] = ()
    ) -> None:
        self._task = task
        self._start = seed * ITEMS_PER_SEED
        self._position = position
        self._unfinished = deque(unfinished)

    @property
    def position(self) -> int:
        """How many indices have been drawn."""
        return self._position

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems."""
        problems: list[Problem] = []
        while len(problems) < count:
            problem = self._task.training_problem(self._next_index())
            if problem is not None:
                problems.append(problem)
        return problems

    def _next_index(self) -> int:
        if self._unfinished:
            return self._unfinished.popleft()
        self._position += 1
        return self._start + self._position - 1


def _given_letters(problem: Problem) -> list[str]:
    return list(problem.entry["metadata"]["letters"])


def _letters(problem: Problem) -> str:
    return "".join(sorted(_given_letters(problem)))
