"""What became of each prompt so far: the history that group filters and curricula go by."""

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
    """How often a prompt was trained on, filtered, failed, or given back to be issued again.

    `num_scored`: its groups with a reward, which those have of which not every rollout failed.
    `mean_reward`: over these groups, of their mean rewards; None before the first. `last_reward`:
    of the latest of them. `last_version`: the newest version that sampled a token of it.
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
        """How often it was issued, as far as these have ended."""
        return self.num_trained + self.num_filtered + self.num_failed + self.num_given_back

    def after(self, outcome: PromptOutcome) -> PromptHistory:
        """This history with one outcome more."""
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
    """What became of a prompt that was issued. `key`: (epoch, position) of its ticket.

    `fate`: a field of PromptHistory without its "num_". `reward`: the mean of the group;
    None, or NaN, if it has none.
    """

    key: tuple[int, int]
    index: int
    fate: str
    reward: float | None = None
    version: int | None = None


class PromptHistories:
    """The histories of the prompts that were seen last, at most `max_prompts` of them.

    What is published changes with `publish` alone, which takes outcomes in the order of the
    tickets: it does not depend on which group of a batch was finished first.
    """

    def __init__(self, max_prompts: int) -> None:
        self._max_prompts = max_prompts
        self._base: OrderedDict[int, PromptHistory] = OrderedDict()  # the one seen last at the end
        # The outcomes of the last publish, apart, since a state may leave some of them out.
        self._last: list[PromptOutcome] = []
        self._pending: list[PromptOutcome] = []
        self._published: dict[int, PromptHistory] = {}  # of the prompts in `_last`

    def published(self, index: int) -> PromptHistory:
        """The history of row `index` at the last `publish`; NEW_PROMPT if it is not known."""
        return self._published.get(index) or self._base.get(index, NEW_PROMPT)

    def latest(self, index: int) -> PromptHistory:
        """The same with all that was added since."""
        history = self.published(index)
        for outcome in self._pending:
            if outcome.index == index:
                history = history.after(outcome)
        return history

    def add(self, outcome: PromptOutcome) -> None:
        """Record what became of a prompt."""
        self._pending.append(outcome)

    def publish(self) -> set[int]:
        """Publish what was added. Returns the rows whose published history has changed."""
        _fold(self._base, self._last)
        self._last = _by_ticket(self._pending)
        self._pending, self._published = [], {}
        for outcome in self._last:
            self._published[outcome.index] = self.published(outcome.index).after(outcome)
        return self._published.keys() | self._forget()

    def _forget(self) -> set[int]:
        """Forget the rows that are too many, those seen the longest ago; returns them."""
        num_too_many = len(self._base.keys() | self._published.keys()) - self._max_prompts
        older = (index for index in self._base if index not in self._published)
        forgotten = set(islice(older, max(num_too_many, 0)))
        for index in forgotten:
            del self._base[index]
        return forgotten

    def state(self, untrained: Container[tuple[int, int]] = ()) -> list[list[Any]]:
        """All that was added, as JSON. `untrained`: keys whose being trained is left out."""
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
        """Forget everything, and continue from a `state`."""
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
