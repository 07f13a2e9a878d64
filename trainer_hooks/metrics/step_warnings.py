"""Warnings of training steps that taught nothing: how rows hold them, and when they are shown.

`trainer_hooks.train.no_signal` makes the warnings. `trainer_hooks.metrics.logger` sends them to W&B
as alerts, and `trainer_hooks.metrics.console` and `trainer_hooks.train.dashboard` print them.
`trainer_hooks.train.summary` and `trainer_hooks.train.report` show `run_warnings`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_hooks.metrics.figures import training_steps

WARNINGS = "warnings"  # column of a row: the text of each warning by its kind
REPEAT_STEPS = 10  # number of steps after which a lasting warning is shown again

# What happened in a step, by the kind of warning.
KINDS = {
    "same_scores": "every group scored the same: nothing was learned from the reward",
    "all_cut": "every completion was cut by the length limit",
    "nothing_trained": "nothing was trained",
    "zero_gradient": "the gradient was zero",
}


def run_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each kind of warning in a run's rows, the most frequent kind first.

    For example "in 5 of 5 steps every group scored the same: nothing was learned from the reward".
    """
    steps = training_steps(rows)
    counts = Counter(kind for step in steps for kind in step.get(WARNINGS, {}))
    return [
        f"in {count:,} of {len(steps):,} steps {KINDS.get(kind, kind)}"
        for kind, count in counts.most_common()
    ]


class WarningFilter:
    """Chooses which warnings of successive rows to show.

    A warning is shown at its first step. When it occurs at least REPEAT_STEPS training steps later,
    it is shown again, with the number of steps that had it.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._shown_at: dict[str, int] = {}
        self._counts: Counter[str] = Counter()  # steps with the warning since it was shown

    def due(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the warnings of `row` to show now, by kind. Call this once for each row."""
        self._num_steps += len(training_steps([row]))
        shown = {}
        for kind, text in row.get(WARNINGS, {}).items():
            self._counts[kind] += 1
            num_since = self._num_steps - self._shown_at.get(kind, -REPEAT_STEPS)
            if num_since < REPEAT_STEPS:
                continue
            if kind in self._shown_at:
                text += f" So in {self._counts[kind]} of the last {num_since} steps."
            shown[kind] = text
            self._shown_at[kind], self._counts[kind] = self._num_steps, 0
        return shown
