"""ProgressView: a live progress bar of a run in the terminal, or plain lines without a terminal.

Used by users as the `console` of a MetricsLogger, by `trainer_hooks.train.main` for the warm-up,
and by `trainer_hooks.train.dashboard` if there is no terminal. A ProgressView prints to a rich
Console.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollout.extras import extra_needed
from trainer_hooks.metrics.axes import TRAINER_STEP
from trainer_hooks.metrics.figures import STEP_S, WINDOW_STEPS, step_seconds
from trainer_hooks.metrics.stage_clock import StageClock
from trainer_hooks.metrics.step_warnings import WarningFilter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LONGEST_SILENCE_S = 60.0

# Format of each shown metric, by name.
DEFAULT_COLUMNS = {
    "reward": "reward {:.3f}",
    "completions/tokens_per_s": "{:,.0f} tokens/s",
    "policy_staleness/mean": "staleness {:.2f}",
}


class ProgressView:
    """A progress bar beside the latest values of a few metrics.

    `console`: where to print. None means standard output.
    `columns`: format of each shown metric, by name. None means DEFAULT_COLUMNS.
    `line_interval`: number of steps between printed lines if the output is not a terminal. A line
    is also printed if LONGEST_SILENCE_S seconds have passed since the last one.
    `clock`: returns seconds.
    Raises ConfigError if the package rich is not installed.
    """

    def __init__(
        self,
        console: Console | None = None,
        columns: Mapping[str, str] | None = None,
        line_interval: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        with extra_needed("train", "ProgressView"):
            from rich.console import Console
        self._console = console or Console()
        self._columns = DEFAULT_COLUMNS if columns is None else columns
        self._line_interval, self._stage_clock = line_interval, StageClock(clock)
        self._clock, self._printed_s = clock, clock()
        self._progress: Progress | None = None
        self._title = ""
        self._num_steps = 0
        self._step_name = TRAINER_STEP
        self._last_step: int | None = None
        self._latest: dict[str, Any] = {}
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=WINDOW_STEPS)
        self._warnings = WarningFilter()

    def start_stage(self, title: str, num_steps: int, step_name: str = TRAINER_STEP) -> None:
        """End the bar, if any, and begin one of `num_steps` that follows the metric `step_name`."""
        self.close()
        self._title, self._num_steps, self._step_name = title, num_steps, step_name
        self._latest, self._last_step = {}, None
        self._recent.clear()
        self._stage_clock.start(num_steps)
        if not self._console.is_terminal:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[values]}"),
            console=self._console,
        )
        self._progress.add_task(title, total=num_steps, values="")
        self._progress.start()

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show one row of metrics, and print its warnings in red.

        A row without the metric `step_name` only updates the values.
        """
        self._latest.update({name: metrics[name] for name in self._columns if name in metrics})
        values = "  ".join(
            self._columns[name].format(self._latest[name])
            for name in self._columns
            if self._latest.get(name) is not None
        ).replace("  (", " (")
        for text in self._warnings.due(metrics).values():
            # The bar's console is this one, and prints above the bar.
            self._console.print(
                text, style="bold red", markup=False, highlight=False, soft_wrap=True
            )
        step = metrics.get(self._step_name)
        if step:
            if STEP_S in metrics:
                self._recent.append(metrics)
            self._stage_clock.reach(step, step_seconds(self._recent))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, values=values)
        elif step is not None and step != self._last_step and self._is_due(step):
            self._last_step = step
            line = f"{self._title} {step}/{self._num_steps}  {values}  {self._stage_clock.text()}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._printed_s = self._clock()

    def _is_due(self, step: int) -> bool:
        is_late = self._clock() - self._printed_s >= LONGEST_SILENCE_S
        return step % self._line_interval == 0 or step == self._num_steps or is_late

    def close(self) -> None:
        """End the bar, leaving its last state on the screen. A second call has no effect."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
