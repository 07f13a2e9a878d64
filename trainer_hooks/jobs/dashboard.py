"""A live dashboard of an asynchronous run in the terminal; plain lines where there is none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollout.engine.reports import EngineStats
from trainer_hooks.jobs.charts import curve_lines, histogram_table, share_bar
from trainer_hooks.jobs.samples import Sample, samples_text
from trainer_hooks.metrics.axes import ROLLOUT_VERSION, TRAINER_STEP
from trainer_hooks.metrics.console import DEFAULT_COLUMNS, ProgressView
from trainer_hooks.metrics.histogram import read_histogram

NUM_REMEMBERED_STEPS = 2_000
CURVE_WIDTH, CURVE_HEIGHT = 44, 6

# Metric name -> how its latest value is shown, below the curve.
RATES = {
    "completions/tokens_per_s": "{:,.0f} tokens/s generated",
    "train/tokens_per_s": "{:,.0f} tokens/s trained on",
    "engine/idle_share": "engines idle {:.0%}",
    "timing_s/step": "{:.2f} s per step",
}
PLAIN_COLUMNS = {
    **DEFAULT_COLUMNS,
    "eval/greedy_reward": "held out {:.3f}",
    "timing_share/wait": "waiting {:.0%}",
    "engine/idle_share": "engines idle {:.0%}",
}


class Dashboard:
    """Shows the latest rows of a MetricsLogger: reward, staleness, time, engines and producer.

    `show_engines` adds a line per engine; without it the engines are one line, from `engine/*`.
    All `rollouts/*` metrics, the producer's, are listed by name. `line_interval`: steps between
    the lines that are printed where the output is no terminal. `clock`: seconds, for the time that
    a stage took and will take.
    """

    def __init__(
        self,
        console: Console | None = None,
        title: str = "training",
        num_steps: int | None = None,
        line_interval: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._plain = ProgressView(self._console, PLAIN_COLUMNS, line_interval)
        self._live: Live | None = None
        self._title, self._num_steps, self._step_name = title, num_steps, TRAINER_STEP
        self._latest: dict[str, Any] = {}
        self._rewards: deque[tuple[int, float]] = deque(maxlen=NUM_REMEMBERED_STEPS)
        self._engines: dict[str, EngineStats] = {}
        self._samples: list[Sample] = []
        self._progress: tuple[int, int] | None = None
        self._clock = clock
        self._start: tuple[float, int | None] | None = None  # seconds, and the step then

    @property
    def is_live(self) -> bool:
        """Whether it is redrawn on a terminal; otherwise lines are printed."""
        return self._console.is_terminal

    def start_stage(self, title: str, num_steps: int, step_name: str = TRAINER_STEP) -> None:
        """Begin a stage of `num_steps`, counted by the metric `step_name`."""
        self._title, self._num_steps, self._step_name = title, num_steps, step_name
        self._start = (self._clock(), None)
        if not self._console.is_terminal:
            self._plain.start_stage(title, num_steps, step_name)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show one row of metrics."""
        # A histogram has no columns for bins above its largest value: it is replaced as a whole.
        for name in [name for name in self._latest if "/hist/" in name]:
            if any(other.startswith(name.rpartition("/")[0]) for other in metrics):
                del self._latest[name]
        self._latest.update(metrics)
        self._progress = None
        if self._start is not None and self._start[1] is None and self._step_name in metrics:
            # A resumed run begins at a later step; the first row is the first step done, or step 0.
            self._start = (self._start[0], max(metrics[self._step_name] - 1, 0))
        reward, step = metrics.get("reward"), metrics.get(TRAINER_STEP)
        if reward is not None and step is not None:
            self._rewards.append((step, reward))
        if self._console.is_terminal:
            self._refresh()
        else:
            self._plain.show(metrics)

    def show_engines(self, engines: Mapping[str, EngineStats]) -> None:
        """Show the state of each engine, by name."""
        self._engines = dict(engines)
        if self._console.is_terminal:
            self._refresh()

    def show_progress(self, num_done: int, num_wanted: int) -> None:
        """Show how many rollouts of the next batch there are."""
        self._progress = (num_done, num_wanted)
        if self._console.is_terminal:
            self._refresh()

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Show what the policy wrote, instead of the samples before; printed without a terminal."""
        self._samples = list(samples)
        if self._console.is_terminal:
            self._refresh()
        else:
            self._console.print(samples_text(samples), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back; twice is fine."""
        self._plain.close()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """The dashboard as it stands."""
        top = Table.grid(expand=True, padding=(0, 1))
        top.add_column(ratio=3)
        top.add_column(ratio=2)
        top.add_row(
            Panel(self._reward_chart(), title="reward", border_style="blue"),
            Panel(self._staleness(), title="policy staleness, tokens", border_style="blue"),
        )
        parts: list[RenderableType] = [self._headline(), top]
        shares = self._with_prefix("timing_share/")
        if shares:
            parts.append(Panel(share_bar(shares), title="time of a step", border_style="blue"))
        bottom = Table.grid(expand=True, padding=(0, 1))
        bottom.add_column(ratio=3)
        bottom.add_column(ratio=2)
        bottom.add_row(
            Panel(self._engine_table(), title="engines", border_style="blue"),
            Panel(self._producer_table(), title="producer", border_style="blue"),
        )
        parts.append(bottom)
        if self._samples:
            shown = samples_text(self._samples)
            parts.append(Panel(shown, title="samples", border_style="blue"))
        return Group(*parts)

    def _refresh(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self.render(), refresh=True)

    def _headline(self) -> RenderableType:
        step = self._latest.get(self._step_name, 0)
        version = self._latest.get(ROLLOUT_VERSION)
        line = Table.grid(padding=(0, 2))
        cells: list[RenderableType] = [Text(self._title, style="bold")]
        if self._num_steps:
            cells.append(ProgressBar(total=self._num_steps, completed=step, width=24))
            cells.append(Text(f"step {step}/{self._num_steps}"))
        else:
            cells.append(Text(f"step {step}"))
        if version is not None:
            cells.append(Text(f"weights version {version}"))
        if self._progress is not None:
            cells.append(Text("{:,} of {:,} rollouts".format(*self._progress), style="cyan"))
        if times := self._times(step):
            cells.append(Text(times, style="dim"))
        line.add_row(*cells)
        return line

    def _times(self, step: int) -> str:
        """How long the stage has taken, and about how long the rest will take."""
        if self._start is None:
            return ""
        start_s, first_step = self._start
        elapsed_s = self._clock() - start_s
        num_done = step - (first_step or 0)
        if not self._num_steps or num_done < 1:
            return f"elapsed {minutes(elapsed_s)}"
        left_s = elapsed_s / num_done * (self._num_steps - step)
        return f"elapsed {minutes(elapsed_s)}, left about {minutes(left_s)}"

    def _reward_chart(self) -> RenderableType:
        rates = "   ".join(
            form.format(self._latest[name])
            for name, form in RATES.items()
            if self._latest.get(name) is not None
        )
        if not self._rewards:
            return Group(Text("no step yet", style="dim"), Text(rates))
        values = [reward for _, reward in self._rewards]
        lines = curve_lines(values, CURVE_WIDTH, CURVE_HEIGHT)
        chart = Text("\n".join(lines), style="green", no_wrap=True, overflow="crop")
        latest = f"now {values[-1]:.3f}   best {max(values):.3f}"
        return Group(chart, Text(latest, style="bold"), Text(rates, style="dim"))

    def _staleness(self) -> RenderableType:
        counts = read_histogram(self._latest, "policy_staleness")
        return histogram_table(counts) if counts else Text("no tokens yet", style="dim")

    def _engine_table(self) -> RenderableType:
        table = Table(box=None, expand=True, pad_edge=False)
        for column in ("engine", "state", "running", "waiting", "version"):
            numeric = column in ("running", "waiting", "version")
            table.add_column(column, justify="right" if numeric else "left")
        for name, stats in self._engines.items():
            table.add_row(
                name,
                Text(stats.state.name.lower(), style="green" if stats.num_running else "yellow"),
                str(stats.num_running),
                str(stats.num_waiting),
                str(stats.weights_version),
            )
        if not self._engines and "engine/num_running" in self._latest:
            keys = ("engine/num_running", "engine/num_waiting", "engine/weights_version")
            table.add_row("all", "", *(str(self._latest.get(key, "")) for key in keys))
        return table if table.row_count else Text("nothing reported", style="dim")

    def _producer_table(self) -> RenderableType:
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column()
        table.add_column(justify="right")
        for name, value in self._with_prefix("rollouts/").items():
            shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            table.add_row(name.replace("_", " "), shown)
        return table if table.row_count else Text("nothing reported", style="dim")

    def _with_prefix(self, prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._latest.items()
            if name.startswith(prefix) and value is not None and "/hist/" not in name
        }


def minutes(seconds: float) -> str:
    """Seconds as 3:07, or 1:03:07."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    text = f"{rest // 60:02}:{rest % 60:02}"
    return f"{hours}:{text}" if hours else text.removeprefix("0")
