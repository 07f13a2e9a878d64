"""MetricsLogger: writes each row of metrics to a JSONL file, wandb and the console.

Used by users' training loops, by `main`, `run_files` and `samples` of `trainer_hooks.train`, and by
engines as `metrics_writer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rollout.errors import ConfigError
from rollout.telemetry import ObserverGuard
from trainer_hooks.metrics.axes import ROLLOUT_VERSION, TRAINER_STEP
from trainer_hooks.metrics.jsonl import JsonlWriter
from trainer_hooks.metrics.step_warnings import WARNINGS, WarningFilter
from trainer_hooks.metrics.wandb_run import as_table, with_histograms


class WandbRun(Protocol):
    """The methods of a wandb run that MetricsLogger calls. `start_wandb_run` makes a wandb run."""

    def log(self, data: dict[str, Any]) -> Any:
        """Record one row."""
        ...

    def finish(self, exit_code: int | None = None) -> Any:
        """Write pending rows and close the run."""
        ...

    def alert(self, title: str, text: str, level: str) -> Any:
        """Record an alert, which the W&B app shows and may forward."""
        ...

    @property
    def summary(self) -> Any:
        """The run's final figures. `summary.update(figures)` adds some."""
        ...


class MetricsView(Protocol):
    """Shows the latest metrics to a person, as ProgressView does."""

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show one row of metrics."""
        ...

    def close(self) -> None:
        """Release the terminal."""
        ...


class MetricsLogger:
    """Writes each row of metrics to a JSONL file, a wandb run and a view, as far as they are given.

    A MetricsLogger also serves as `metrics_writer` of an InferenceConfig. Rows without a step or
    version, such as the engine's, get the latest ones. Histogram columns also go to wandb as
    histograms, and warnings as alerts. As a context manager it closes everything at the end, also
    after an exception.
    An error of the wandb run or the view is logged once. Errors of the JSONL file are raised, since
    a resumed run needs this file.
    `jsonl`: path of the JSONL file.
    `console`: the view.
    `resume_step`: step from which a resumed run continues. None starts a new JSONL file.
    Raises ConfigError if neither `jsonl`, `wandb` nor `console` is given.
    """

    def __init__(
        self,
        jsonl: Path | str | None = None,
        wandb: WandbRun | None = None,
        console: MetricsView | None = None,
        resume_step: int | None = None,
    ) -> None:
        if jsonl is None and wandb is None and console is None:
            raise ConfigError("a MetricsLogger writes to something: give jsonl, wandb or console")
        self._jsonl = None if jsonl is None else JsonlWriter(jsonl, resume_step)
        self._wandb, self._wandb_guard = wandb, ObserverGuard("the wandb run")
        self._console, self._console_guard = console, ObserverGuard("the view of the metrics")
        self._axes: dict[str, int] = {}
        self._warnings = WarningFilter()

    def log(
        self, metrics: Mapping[str, Any], step: int | None = None, version: int | None = None
    ) -> None:
        """Write one row with `step` as `trainer/step` and `version` as `rollout/version`.

        None means the latest step or version that was given, if any.
        `metrics`: numbers by name. The entry `warnings`, if any, maps kinds to texts (see
        `step_warnings`).
        """
        if step is not None:
            self._axes[TRAINER_STEP] = step
        if version is not None:
            self._axes[ROLLOUT_VERSION] = version
        row = {**self._axes, **metrics}
        if self._jsonl is not None:
            self._jsonl.log(row)
        if self._wandb is not None:
            self._wandb_guard.call(self._send, self._wandb, row)
        if self._console is not None:
            self._console_guard.call(self._console.show, row)

    def _send(self, run: WandbRun, row: Mapping[str, Any]) -> None:
        run.log(with_histograms({name: row[name] for name in row if name != WARNINGS}))
        for kind, text in self._warnings.due(row).items():
            run.alert(kind.replace("_", " "), text, "WARN")

    def log_summary(self, figures: Mapping[str, Any]) -> None:
        """Write the final figures of a run to the summary of the wandb run, if there is one."""
        if self._wandb is not None:
            self._wandb_guard.call(lambda run: run.summary.update(dict(figures)), self._wandb)

    @contextmanager
    def shown_by(self, view: MetricsView) -> Iterator[None]:
        """While the block runs, show rows in `view` instead of the logger's own view.

        Closes `view` at the end of the block.
        """
        own, self._console = self._console, view
        try:
            yield
        finally:
            self._console = own
            view.close()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table at the latest step to the wandb run, if there is one."""
        if self._wandb is not None:
            self._wandb_guard.call(
                lambda run: run.log({**self._axes, name: as_table(columns, rows)}), self._wandb
            )

    def close(self, exit_code: int = 0) -> None:
        """Close the file, the view and the wandb run. A non-zero `exit_code` means a failed run."""
        if self._jsonl is not None:
            self._jsonl.close()
        if self._console is not None:
            self._console_guard.call(self._console.close)
        if self._wandb is not None:
            self._wandb_guard.call(lambda run: run.finish(exit_code=exit_code), self._wandb)

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)
