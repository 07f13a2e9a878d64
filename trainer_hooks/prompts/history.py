"""PromptHistory: how often a prompt was trained on, filtered or failed, and its latest reward.

Written by `trainer_hooks.prompts.ledger`. Read by `trainer_hooks.prompts.curriculum`,
`trainer_hooks.producer.filters`, and users' filters and weights.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import islice
from typing import Any

TRAINED, FILTERED, FAILED, GIVEN_BACK = "trained", "filtered", "failed", "given_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptHistory:
    """Counts of the outcomes of a prompt, and its rewards.

    Each issue of the prompt ends as trained, filtered, failed or given back.
    `num_scored`: number of the prompt's groups with a mean reward.
    `mean_reward`: mean of these groups' mean rewards, or None.
    `last_reward`: mean reward of the latest of these groups, or None.
    `last_version`: newest version that sampled a token of the latest of these groups, or None.
    """

    num_trained: int = 0
    num_filtered: int = 0
    num_failed: int = 0
    num_given_back: int = 0
    num_scored: int = 0
    mean_reward: float | None = None
    last_reward: float | None = None
    last_version: int | None = None

    @property
    def num_issued(self) -> int:
        """Number of times that the prompt was issued and ended. Groups in progress do not count."""
        return self.num_trained + self.num_filtered + self.num_failed + self.num_given_back

    def after(self, outcome: PromptOutcome) -> PromptHistory:
        """Return this history with one more outcome."""
        count = f"num_{outcome.fate}"
        counted = replace(self, **{count: getattr(self, count) + 1})
        if outcome.reward is None or math.isnan(outcome.reward):
            return counted
        num_scored = self.num_scored + 1
        mean = 0.0 if self.mean_reward is None else self.mean_reward
        return replace(
            counted,
            num_scored=num_scored,
            mean_reward=mean + (outcome.reward - mean) / num_scored,
            last_reward=outcome.reward,
            last_version=outcome.version,
        )


NEW_PROMPT = PromptHistory()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutcome:
    """The outcome of one issue of a prompt.

    `key`: epoch and position of the ticket.
    `index`: row of the prompt.
    `fate`: name of a count in PromptHistory, without "num_".
    `reward`: mean reward of the group. None or NaN without one.
    `version`: newest version that sampled a token of the group, or None if it is not recorded.
    """

    key: tuple[int, int]
    index: int
    fate: str
    reward: float | None = None
    version: int | None = None


class PromptHistories:
    """Histories of the `max_prompts` prompts that had an outcome last.

    `publish` applies outcomes in the order of tickets, so published histories do not depend on
    which group finished first.
    """

    def __init__(self, max_prompts: int) -> None:
        self._max_prompts = max_prompts
        self._base: OrderedDict[int, PromptHistory] = OrderedDict()  # the latest seen at the end
        # Outcomes of the last publish are kept apart: `state` can leave some of them out.
        self._last: list[PromptOutcome] = []
        self._pending: list[PromptOutcome] = []
        self._published: dict[int, PromptHistory] = {}  # of the prompts in `_last`

    def published(self, index: int) -> PromptHistory:
        """Return the history of row `index` at the last `publish`, or NEW_PROMPT."""
        return self._published.get(index) or self._base.get(index, NEW_PROMPT)

    def latest(self, index: int) -> PromptHistory:
        """Return the history of row `index`, including outcomes that are not published yet."""
        history = self.published(index)
        for outcome in self._pending:
            if outcome.index == index:
                history = history.after(outcome)
        return history

    def add(self, outcome: PromptOutcome) -> None:
        """Record an outcome for the next `publish`."""
        self._pending.append(outcome)

    def publish(self) -> set[int]:
        """Publish the recorded outcomes. Returns the rows whose published history changed."""
        _fold(self._base, self._last)
        self._last = _by_ticket(self._pending)
        self._pending, self._published = [], {}
        for outcome in self._last:
            self._published[outcome.index] = self.published(outcome.index).after(outcome)
        return self._published.keys() | self._forget()

    def _forget(self) -> set[int]:
        # Drops the histories whose last outcome is oldest, and returns their rows.
        num_too_many = len(self._base.keys() | self._published.keys()) - self._max_prompts
        older = (index for index in self._base if index not in self._published)
        forgotten = set(islice(older, max(num_too_many, 0)))
        for index in forgotten:
            del self._base[index]
        return forgotten

    def state(self, untrained: Container[tuple[int, int]] = ()) -> list[list[Any]]:
        """Return the histories of all rows, including unpublished outcomes, as JSON.

        `untrained`: ticket keys whose outcome "trained" is left out.
        """
        histories = self._base.copy()
        _fold(
            histories,
            [
                outcome
                for outcome in (*self._last, *_by_ticket(self._pending))
                if outcome.fate != TRAINED or outcome.key not in untrained
            ],
        )
        return [[index, *astuple(history)] for index, history in histories.items()]

    def load(self, rows: Iterable[Sequence[Any]]) -> None:
        """Replace all histories by the histories of a `state`, as published."""
        self._last, self._pending, self._published = [], [], {}
        names = [field.name for field in fields(PromptHistory)]
        self._base = OrderedDict(
            (index, PromptHistory(**dict(zip(names, values, strict=True))))
            for index, *values in rows
        )
        self._forget()


def _fold(histories: OrderedDict[int, PromptHistory], outcomes: Iterable[PromptOutcome]) -> None:
    for outcome in outcomes:
        history = histories.get(outcome.index, NEW_PROMPT)
        histories[outcome.index] = history.after(outcome)
        histories.move_to_end(outcome.index)


def _by_ticket(outcomes: Iterable[PromptOutcome]) -> list[PromptOutcome]:
    return sorted(outcomes, key=lambda outcome: outcome.key)
