"""A live dashboard of a run in the terminal; plain lines where there is no terminal.

Used by `trainer_hooks.train.main`, and by users' training loops, as the `console` of a
MetricsLogger. `trainer_hooks.train.samples` sends it samples. It prints to a rich Console.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollout import AsyncLLM
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.control.reports import EngineStats, stats_by_engine
from trainer_hooks.metrics import TimeAccount
from trainer_hooks.metrics.axes import ROLLOUT_VERSION, TRAINER_STEP
from trainer_hooks.metrics.console import DEFAULT_COLUMNS, ProgressView
from trainer_hooks.metrics.figures import (
    NUM_HELD_OUT,
    STEP_S,
    WINDOW_STEPS,
    of_prompts,
    step_seconds,
)
from trainer_hooks.metrics.histogram import read_histogram
from trainer_hooks.metrics.stage_clock import StageClock
from trainer_hooks.metrics.step_warnings import WARNINGS
from trainer_hooks.producer import AsyncRolloutProducer
from trainer_hooks.train.charts import (
    EngineRates,
    curve_lines,
    engine_table,
    flowed,
    histogram_table,
    share_bar,
)
from trainer_hooks.train.samples import MIN_LINES, FittedSamples, Sample, samples_text

_SCALE_WIDTH = 8  # columns of the numbers beside a curve
_FRAME_LINES, _FRAME_WIDTH = 2, 4  # lines and columns of a panel's frame
_SHORT_LINES = 30  # terminals with fewer lines get a lower curve
_TITLE_WIDTH, _BAR_WIDTH = 16, 8  # minimum widths in the headline

# Metric name -> how its latest value is shown, below the curve.
RATES = {
    "completions/tokens_per_s": "{:,.0f} tokens/s generated",
    "train/tokens_per_s": "{:,.0f} tokens/s trained on",
}
PLAIN_COLUMNS = {
    **DEFAULT_COLUMNS,
    "eval/greedy_reward": "held out {:.3f}",
    "eval/num_prompts": "(n={:,.0f})",
    "timing_share/wait": "waiting {:.0%}",
    "engine/idle_share": "engines idle {:.0%}",
}
# The trainer's activity as shown, by the category of its time account.
ACTIVITIES = {
    "generate": "generating",
    "wait": "waiting for rollouts",
    "train": "training",
    "update": "updating weights",
    "evaluate": "evaluating",
    "checkpoint": "saving",
}


class Dashboard:
    """Shows the latest rows of a MetricsLogger: reward, staleness, time, engines and producer.

    It fits the terminal: panels shrink, and samples get the remaining lines.
    `show_engines` gives each engine a line; without it `engine/*` metrics give one line for all.
    Metrics `rollouts/*` that are not 0 are listed by name.
    `num_steps`: steps of the run; None if the number is not known.
    `line_interval`: steps between printed lines if the output is not a terminal.
    `clock`: returns seconds, for the times of a stage and the engines' rates.
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
        self._plain = ProgressView(self._console, PLAIN_COLUMNS, line_interval, clock)
        self._live: Live | None = None
        self._title, self._num_steps, self._step_name = title, num_steps, TRAINER_STEP
        self._latest: dict[str, Any] = {}
        self._rewards: list[float] = []
        self._held_out: str | None = None
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=WINDOW_STEPS)
        self._engines: dict[str, EngineStats] = {}
        self._samples: list[Sample] = []
        self._progress: tuple[int, int] | None = None
        self._activity = ""
        self._clock, self._stage_clock, self._rates = clock, StageClock(clock), EngineRates()

    @property
    def is_live(self) -> bool:
        """Whether the dashboard is redrawn on a terminal; otherwise lines are printed."""
        return self._console.is_terminal

    def start_stage(self, title: str, num_steps: int, step_name: str = TRAINER_STEP) -> None:
        """Begin a stage of `num_steps`, counted by the metric `step_name`."""
        self._title, self._num_steps, self._step_name = title, num_steps, step_name
        self._stage_clock.start(num_steps)
        if not self._console.is_terminal:
            self._plain.start_stage(title, num_steps, step_name)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show one row of metrics beside the latest values of other metrics.

        Histogram bins and counts `rollouts/*` that the row lacks are 0 if it has others of them.
        """
        self._forget_replaced(metrics)
        self._latest.update(metrics)
        if self._progress is not None:  # the next batch is counted from here on
            self._progress = (0, self._progress[1])
        self.recall([metrics])
        step = metrics.get(self._step_name)
        if step:
            self._stage_clock.reach(step, step_seconds(self._recent))
        self._refresh()
        if not self._console.is_terminal:
            self._plain.show(metrics)

    def recall(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, such as those before a resume, to the curve and to the time of a step."""
        self._recent.extend(row for row in rows if STEP_S in row)
        for row in rows:
            reward = row.get("reward")
            if reward is not None and math.isfinite(reward):  # at least one rollout has a reward
                self._rewards.append(reward)
            if row.get("eval/greedy_reward") is not None:
                num = of_prompts(row.get(NUM_HELD_OUT))
                self._held_out = f"held out {row['eval/greedy_reward']:.3f}{num}"

    def _forget_replaced(self, metrics: Mapping[str, Any]) -> None:
        """Drop the latest bins of each histogram that the row has, and `rollouts/*` counts if it
        has any. A row lacks those that are 0. A training step's row also replaces the warnings.
        """
        if "reward" in metrics:
            self._latest.pop(WARNINGS, None)
        groups = {n.rpartition("/hist/")[0] + "/hist/" for n in metrics if "/hist/" in n}
        groups |= {"rollouts/"} if any(n.startswith("rollouts/") for n in metrics) else set()
        for name in [n for n in self._latest if n.startswith(tuple(groups))]:
            del self._latest[name]

    def show_engines(self, engines: Mapping[str, EngineStats]) -> None:
        """Show the state of each engine, by name, with its tokens per second over recent calls."""
        self._engines, now_s = dict(engines), self._clock()
        for name, stats in engines.items():
            self._rates.add(name, stats, now_s)
        self._refresh()

    def show_progress(self, num_done: int, num_wanted: int, activity: str = "") -> None:
        """Show how many rollouts of the next batch are finished, and what the trainer does now.

        `activity`: a category of TimeAccount, or another text.
        """
        self._progress, self._activity = (num_done, num_wanted), ACTIVITIES.get(activity, activity)
        self._refresh()

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Show these samples in place of the previous ones; without a terminal they are printed."""
        self._samples = list(samples)
        self._refresh()
        if not self._console.is_terminal:
            self._console.print(samples_text(samples), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal. May be called twice."""
        self._plain.close()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        width, height = self._console.size
        self._live.update(self.render(width, height - 1), refresh=True)

    # ---- the picture

    def render(self, width: int, height: int | None = None) -> RenderableType:
        """Return the dashboard, `width` columns wide and at most `height` lines high.

        A `height` of None sets no limit. In 80 columns and 23 lines everything but some samples is
        shown.
        """
        is_short = height is not None and height < _SHORT_LINES
        parts = [
            self._headline(width),
            *self._warnings(width, is_short),
            self._top_row(width, 3 if is_short else 6),
        ]
        if shares := self._with_prefix("timing_share/"):
            step_s = step_seconds(self._recent)
            seconds = "" if step_s is None else f": {step_s:.2f} s"
            bar = share_bar(shares, width - _FRAME_WIDTH)
            parts.append(_panel(f"time of a step{seconds}", bar))
        num_engines = None if height is None else max(height // 6, 1)
        counts = self._producer_counts()
        counts.no_wrap, counts.overflow = is_short, "ellipsis"
        idle = self._value("engine/idle_share", ", {:.0%} idle")
        engines = Group(self._engine_table(num_engines), counts)
        parts.append(_panel(f"engines{idle}, and producer", engines))
        if self._samples and height is None:
            parts.append(_panel("samples", samples_text(self._samples)))
        elif self._samples and height is not None:
            options = self._console.options.update(width=width, height=None)
            num_used = len(self._console.render_lines(Group(*parts), options))
            num_left = height - num_used - _FRAME_LINES
            if num_left >= MIN_LINES:
                parts.append(_panel("samples", FittedSamples(self._samples, num_left)))
        return Group(*parts)

    def _warnings(self, width: int, is_short: bool) -> list[Text]:
        """Return the warnings of the latest training step, cut to three lines if `is_short`."""
        texts = [Text(t, style="bold red") for t in self._latest.get(WARNINGS, {}).values()]
        for text in texts if is_short else ():
            # Words are not broken, so a line may hold some cells less than `width`.
            text.truncate(max(3 // len(texts), 1) * (width - 5), overflow="ellipsis")
        return texts

    def _top_row(self, width: int, curve_height: int) -> RenderableType:
        """Return the curve of the reward, with the ages of the tokens beside it."""
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(ratio=3)
        row.add_column(ratio=2)
        curve_width = (width - 1) * 3 // 5 - _FRAME_WIDTH - _SCALE_WIDTH - 1
        row.add_row(
            _panel("reward", self._reward_chart(curve_width, curve_height)),
            _panel("policy staleness, tokens", self._staleness(curve_height + 1)),
        )
        return row

    def _headline(self, width: int) -> RenderableType:
        """Return two lines: steps and weights version; the next batch's rollouts and the time."""
        step, version = self._latest.get(self._step_name, 0), self._latest.get(ROLLOUT_VERSION)
        table = Table.grid(expand=True, padding=(0, 2))
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(width // 4, _TITLE_WIDTH))
        table.add_column(ratio=1, min_width=_BAR_WIDTH)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=self._num_steps, completed=step) if self._num_steps else Text()
        table.add_row(
            Text(self._title, style="bold"),
            bar,
            f"step {step}/{self._num_steps}" if self._num_steps else f"step {step}",
            "" if version is None else f"weights version {version}",
        )
        times = Text(self._stage_clock.text(), style="dim")
        if self._progress is not None:
            done, wanted = self._progress
            table.add_row(
                Text(self._activity, style="cyan"),
                ProgressBar(total=wanted, completed=done, complete_style="cyan"),
                Text(f"{done:,} of {wanted:,} rollouts", style="cyan"),
                times,
            )
        else:
            table.add_row("", "", "", times)
        return table

    def _reward_chart(self, width: int, height: int) -> RenderableType:
        values = (self._value(name, form) for name, form in RATES.items())
        rates = [Text(value, style="dim") for value in values if value]
        shown_rates = flowed(rates, width + _SCALE_WIDTH)
        if not self._rewards:
            return Group(Text("no step yet", style="dim"), shown_rates)
        lines = curve_lines(self._rewards, width, height)
        chart = Text("\n".join(lines), style="green", no_wrap=True, overflow="crop")
        latest = f"now {self._rewards[-1]:.3f}   best {max(self._rewards):.3f}"
        if self._held_out is not None:
            latest += f"   {self._held_out}"
        return Group(chart, Text(latest, style="bold"), shown_rates)

    def _staleness(self, num_lines: int) -> RenderableType:
        counts = read_histogram(self._latest, "policy_staleness")
        if not counts:
            return Text("no tokens yet", style="dim")
        mixed = self._value("policy_staleness/num_mixed_rollouts", "{} rollouts across updates")
        table = histogram_table(counts, num_lines)
        return Group(table, Text(mixed, style="dim")) if mixed else table

    def _engine_table(self, num_lines: int | None) -> RenderableType:
        if self._engines:
            return engine_table(self._engines, self._rates, num_lines)
        if "engine/num_running" not in self._latest:
            return Text("nothing reported", style="dim")
        names = {"running": "num_running", "waiting": "num_waiting", "version": "weights_version"}
        shown = (f"{label} {self._latest.get(f'engine/{n}', '')}" for label, n in names.items())
        return Text(f"all engines: {', '.join(shown)}")

    def _producer_counts(self) -> Text:
        shown = []
        for name, value in self._with_prefix("rollouts/").items():
            words = name.removeprefix("num_").replace("_", " ").replace("/", ": ")
            if value:
                shown.append(f"{value:,.2f} {words}" if value % 1 else f"{value:,.0f} {words}")
        if bound := self._value("producer/max_staleness_versions", "bound {:g} versions"):
            shown.append(bound + self._value("producer/ess", " (effective sample size {:.0%})"))
        text = Text("last batch: " if shown else "", style="dim")
        return text.append(", ".join(shown), style="default")

    def _value(self, name: str, form: str) -> str:
        """Return the latest value of a metric, formatted by `form`; "" if there is none."""
        value = self._latest.get(name)
        return "" if value is None else form.format(value)

    def _with_prefix(self, prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._latest.items()
            if name.startswith(prefix) and value is not None and "/hist/" not in name
        }


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, border_style="blue")


@asynccontextmanager
async def watch_step(
    view: Dashboard,
    llm: ThreadedLLM | AsyncLLM,
    producer: AsyncRolloutProducer,
    account: TimeAccount | None = None,
    interval_s: float = 0.5,
) -> AsyncIterator[None]:
    """Show the engines and the next batch's progress in `view` every `interval_s` of the block.

    `account`: the trainer's time account, which names its current activity; None shows none.
    Without a terminal nothing is shown and engines are not asked. An error of the engines ends the
    refreshing, and the block continues.
    """

    async def look() -> None:
        while True:
            view.show_progress(*producer.progress, "" if account is None else account.current)
            view.show_engines(await _engines(llm))
            await asyncio.sleep(interval_s)

    if not view.is_live:
        yield
        return
    task = asyncio.create_task(look(), name="view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _engines(llm: ThreadedLLM | AsyncLLM) -> dict[str, EngineStats]:
    """Return the statistics of each engine of a fleet by rank, or of a ThreadedLLM as "own"."""
    if not isinstance(llm, AsyncLLM):
        return {"own": await llm.stats()}
    results = await llm.client.engine_stats()
    return {str(rank): stats for rank, stats in stats_by_engine(results.by_rank).items()}
