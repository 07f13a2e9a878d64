"""A live dashboard of a training run in the terminal. If there is no terminal, it prints lines.

Used by `trainer_hooks.train.main`, and by users' training loops, which pass a Dashboard to
MetricsLogger as `console`. `trainer_hooks.train.samples` sends it samples. A Dashboard prints to a
rich Console.
"""

from __future__ import annotations

import asyncio
import math
import threading
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
    HELD_OUT_REWARD,
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
    histogram_table,
    share_bar,
)
from trainer_hooks.train.samples import MIN_LINES, FittedSamples, Sample, samples_text

_SCALE_WIDTH = 8  # columns of the numbers beside a curve
_FRAME_LINES, _FRAME_WIDTH = 2, 4  # lines and columns of a panel's frame
_CURVE_HEIGHTS = (6, 3, 2)  # lines of the curve: the first that leaves room for a sample
_SHORT_LINES = 30  # terminals with fewer lines get the producer's counts in one line
_TITLE_WIDTH, _BAR_WIDTH = 16, 8  # minimum widths in the headline

# These map a metric's name to the text of its latest value. UPDATE is shown as one line, which fits
# into 80 columns, and RATES above the time of a step.
UPDATE = {
    "completions/mean_length": "length {:.0f}",
    "completions/clipped_ratio": "({:.0%} cut)",
    "train/entropy": "entropy {:.2f}",
    "train/approx_kl": "approx_kl {:.1e}",
    "train/grad_norm": "grad {:.2f}",
    "train/learning_rate": "lr {:.2g}",
}
RATES = {
    "completions/tokens_per_s": "{:,.0f} tokens/s sampled",
    "train/tokens_per_s": "{:,.0f} trained on",
}
PLAIN_COLUMNS = {
    **DEFAULT_COLUMNS,
    HELD_OUT_REWARD: "held out {:.3f}",
    NUM_HELD_OUT: "(n={:,.0f})",
    "timing_share/wait": "waiting {:.0%}",
    "engine/idle_share": "engines idle {:.0%}",
}
# The text of the trainer's activity, by the category of TimeAccount.
ACTIVITIES = {
    "generate": "generating",
    "wait": "waiting for rollouts",
    "train": "training",
    "update": "updating weights",
    "evaluate": "evaluating",
    "checkpoint": "saving",
    "other": "",
}


class Dashboard:
    """Shows the latest rows of a MetricsLogger: reward, staleness, time, engines and producer.

    Panels shrink until they fit the terminal, and samples fill the remaining lines. Until
    `show_engines` is called, one line shows the metrics `engine/*`. Then each engine has a line.

    `num_steps`: steps of the run, or None if the number is unknown.
    `line_interval`: steps between printed lines if the output is no terminal.
    `clock`: returns seconds, from which stage times and engine rates are computed.
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
        self._reward_so_far: float | None = None
        self._activity = self._notice = ""
        self._lock = threading.RLock()  # `announce` is called by another thread
        self._clock, self._stage_clock, self._rates = clock, StageClock(clock), EngineRates()

    @property
    def is_live(self) -> bool:
        """Return whether the output is a terminal, in which the dashboard is redrawn."""
        return self._console.is_terminal

    def start_stage(self, title: str, num_steps: int, step_name: str = TRAINER_STEP) -> None:
        """Begin a stage of `num_steps`. The metric `step_name` counts its steps."""
        with self._lock:
            self._title, self._num_steps, self._step_name = title, num_steps, step_name
            self._stage_clock.start(num_steps)
            self._refresh()
        if not self._console.is_terminal:
            self._plain.start_stage(title, num_steps, step_name)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Show one row of metrics, together with the latest values of metrics that the row lacks.

        A histogram bin or a count `rollouts/*` that the row lacks becomes 0 if the row has others
        of its group.
        """
        with self._lock:
            self._drop_replaced(metrics)
            self._latest.update(metrics)
            if self._progress is not None:  # the next batch is counted from here on
                self._progress, self._reward_so_far = (0, self._progress[1]), None
            self.recall([metrics])
            step = metrics.get(self._step_name)
            if step:
                self._stage_clock.reach(step, step_seconds(self._recent))
            self._refresh()
        if not self._console.is_terminal:
            self._plain.show(metrics)

    def recall(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add earlier rows, such as rows before a resume, to the curve and to the mean time of a
        step."""
        self._recent.extend(row for row in rows if STEP_S in row)
        for row in rows:
            reward = row.get("reward")
            if reward is not None and math.isfinite(reward):  # at least one rollout has a reward
                self._rewards.append(reward)
            if (held_out := row.get(HELD_OUT_REWARD)) is not None:
                self._held_out = f"held out {held_out:.3f}{of_prompts(row.get(NUM_HELD_OUT))}"

    def _drop_replaced(self, metrics: Mapping[str, Any]) -> None:
        if "reward" in metrics:  # the row of a training step
            self._latest.pop(WARNINGS, None)
        # A row lacks the bins and counts that are 0, and most of `train/*` if the step was skipped.
        groups = {n.rpartition("/hist/")[0] + "/hist/" for n in metrics if "/hist/" in n}
        for group in ("rollouts/", "train/"):
            groups |= {group} if any(n.startswith(group) for n in metrics) else set()
        for name in [n for n in self._latest if n.startswith(tuple(groups))]:
            del self._latest[name]

    def show_engines(self, engines: Mapping[str, EngineStats]) -> None:
        """Show the state of each engine by name, with its tokens per second over the latest
        calls."""
        with self._lock:
            self._engines, now_s = dict(engines), self._clock()
            for name, stats in engines.items():
                self._rates.add(name, stats, now_s)
            self._refresh()

    def show_progress(
        self, num_done: int, num_wanted: int, activity: str = "", reward: float | None = None
    ) -> None:
        """Show how many samples of the next batch have ended, and what the trainer does now.

        `num_wanted`: samples of the whole batch. 0 shows no count.
        `activity`: a category of TimeAccount, or another text.
        `reward`: mean reward of the scored samples. None or NaN shows no reward.
        """
        with self._lock:
            self._progress = (num_done, num_wanted)
            self._activity = ACTIVITIES.get(activity, activity)
            is_scored = reward is not None and math.isfinite(reward)
            self._reward_so_far = reward if is_scored else None
            self._refresh()

    def announce(self, text: str) -> None:
        """Show `text` at once above everything else, in place of an earlier text. Can be called in
        any thread."""
        with self._lock:
            self._notice = text
            if self._live is None:
                self._console.print(text, style="bold yellow", highlight=False)
            else:
                self._refresh()

    def show_samples(self, samples: Sequence[Sample]) -> None:
        """Show `samples` in place of the previous ones. Without a terminal, print them."""
        with self._lock:
            self._samples = list(samples)
            self._refresh()
        if not self._console.is_terminal:
            self._console.print(samples_text(samples), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal. A second call does
        nothing."""
        self._plain.close()
        with self._lock:
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

        A `height` of None sets no limit. 80 columns and 23 lines have room for everything except
        some samples.
        """
        if height is None:
            samples = [_panel("samples", samples_text(self._samples))] * bool(self._samples)
            return Group(*self._panels(width, None, _CURVE_HEIGHTS[0]), *samples)
        options = self._console.options.update(width=width, height=None)
        fitting: Group | None = None
        for curve_height in _CURVE_HEIGHTS:
            parts = self._panels(width, height, curve_height)
            num_left = height - len(self._console.render_lines(Group(*parts), options))
            if fitting is None and num_left >= 0:
                fitting = Group(*parts)
            if self._samples and (num_lines := num_left - _FRAME_LINES) >= MIN_LINES:
                return Group(*parts, _panel("samples", FittedSamples(self._samples, num_lines)))
        return fitting or Group(*parts)

    def _panels(self, width: int, height: int | None, curve_height: int) -> list[RenderableType]:
        is_short = height is not None and height < _SHORT_LINES
        parts = [self._headline(width)]
        if self._notice:
            parts.insert(0, Text(self._notice.ljust(width), style="bold yellow", no_wrap=True))
        if update := self._shown(UPDATE):
            parts.append(_line_of(update, width))
        parts += [*self._warnings(width, is_short), self._top_row(width, curve_height)]
        if shares := self._with_prefix("timing_share/"):
            step_s = step_seconds(self._recent)
            rates = ["" if step_s is None else f": {step_s:.2f} s", *self._shown(RATES)]
            # With smaller shares the legend does not fit into one line.
            bar = share_bar(shares, width - _FRAME_WIDTH, 0.02 if is_short else 0.005)
            parts.append(_panel("time of a step" + ", ".join(rates), bar))
        num_engines = None if height is None else max(height // 6, 1)
        counts = self._producer_counts()
        counts.no_wrap, counts.overflow = is_short, "ellipsis"
        idle = self._value("engine/idle_share", ", {:.0%} idle")
        engines = Group(self._engine_table(num_engines), *([counts] if counts else []))
        parts.append(_panel(f"engines{idle}, and producer", engines))
        return parts

    def _warnings(self, width: int, is_short: bool) -> list[Text]:
        """Return the warnings of the latest training step. `is_short` cuts them to three lines."""
        texts = [Text(t, style="bold red") for t in self._latest.get(WARNINGS, {}).values()]
        for text in texts if is_short else ():
            # Words are not broken, so a line can be some cells shorter than `width`.
            text.truncate(max(3 // len(texts), 1) * (width - 5), overflow="ellipsis")
        return texts

    def _top_row(self, width: int, curve_height: int) -> RenderableType:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(ratio=3)
        row.add_column(ratio=2)
        curve_width = (width - 1) * 3 // 5 - _FRAME_WIDTH - _SCALE_WIDTH - 1
        num_lines = curve_height + 2  # two lines below the curve show latest and held-out rewards
        row.add_row(
            _panel("reward", self._reward_chart(curve_width, curve_height), num_lines),
            _panel("policy staleness, tokens", self._staleness(num_lines), num_lines),
        )
        return row

    def _headline(self, width: int) -> RenderableType:
        """Return two lines with the steps, the weights version, the next batch's samples and the
        time."""
        step, version = self._latest.get(self._step_name, 0), self._latest.get(ROLLOUT_VERSION)
        steps = Text(f"step {step}/{self._num_steps}" if self._num_steps else f"step {step}")
        versions = Text("" if version is None else f"weights version {version}")
        done, wanted = self._progress or (0, 0)
        samples = Text(f"{done:,} of {wanted:,} samples" if wanted else "", style="cyan")
        times = Text(self._stage_clock.text(), style="dim")
        gap, columns = 2, ((steps, samples), (versions, times))
        num_right = sum(max(text.cell_len for text in column) for column in columns)
        title_width = max(width - num_right - _BAR_WIDTH - 3 * gap, _TITLE_WIDTH)
        table = Table.grid(expand=True, padding=(0, gap))
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=title_width)
        table.add_column(ratio=1, min_width=_BAR_WIDTH)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=self._num_steps, completed=step) if self._num_steps else Text()
        table.add_row(Text(self._title, style="bold"), bar, steps, versions)
        bar = ProgressBar(total=wanted, completed=done, complete_style="cyan") if wanted else Text()
        table.add_row(Text(self._activity, style="cyan"), bar, samples, times)
        return table

    def _reward_chart(self, width: int, height: int) -> RenderableType:
        so_far = self._reward_so_far
        latest = [] if so_far is None else [f"next batch {so_far:.3f}"]
        chart = Text("no step yet", style="dim")
        if self._rewards:
            latest = [f"now {self._rewards[-1]:.3f}", f"best {max(self._rewards):.3f}", *latest]
            lines = curve_lines(self._rewards, width, height)
            chart = Text("\n".join(lines), style="green", no_wrap=True, overflow="crop")
        texts = filter(None, ["   ".join(latest), self._held_out])
        return Group(chart, *(Text(text, style="bold") for text in texts))

    def _staleness(self, num_lines: int) -> RenderableType:
        counts = read_histogram(self._latest, "policy_staleness")
        if not counts:
            return Text("no tokens yet", style="dim")
        mixed = self._value("policy_staleness/num_mixed_rollouts", "{} rollouts across updates")
        if not mixed:
            return histogram_table(counts, num_lines)
        return Group(histogram_table(counts, num_lines - 1), Text(mixed, style="dim"))

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

    def _shown(self, forms: Mapping[str, str]) -> list[str]:
        return [shown for name, form in forms.items() if (shown := self._value(name, form))]

    def _value(self, name: str, form: str) -> str:
        value = self._latest.get(name)
        return "" if value is None else form.format(value)

    def _with_prefix(self, prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._latest.items()
            if name.startswith(prefix) and value is not None and "/hist/" not in name
        }


def _line_of(texts: Sequence[str], width: int) -> Text:
    """Return the texts in one line of `width` columns, with three or two spaces between them."""
    wide, narrow = (gap.join(texts).replace(f"{gap}(", " (") for gap in ("   ", "  "))
    line = wide if len(wide) <= width else narrow
    return Text(line.ljust(width), no_wrap=True, overflow="ellipsis")


def _panel(title: str, content: RenderableType, num_lines: int | None = None) -> Panel:
    """Return a framed panel with `num_lines` lines, or as many as its content has if it is None."""
    height = None if num_lines is None else num_lines + _FRAME_LINES
    return Panel(content, title=title, border_style="blue", height=height)


@asynccontextmanager
async def watch_step(
    view: Dashboard,
    llm: ThreadedLLM | AsyncLLM,
    producer: AsyncRolloutProducer,
    account: TimeAccount | None = None,
    interval_s: float = 0.5,
) -> AsyncIterator[None]:
    """Show the engines and the next batch's progress in `view` every `interval_s` during the block.

    `account` is the trainer's time account, which names its current activity. Without a terminal
    nothing is shown. An error of the engines ends the display but not the block.
    """

    def look() -> None:
        activity = "" if account is None else account.current
        view.show_progress(*producer.progress, activity, producer.reward_so_far)

    async with watch(view, llm, look, interval_s):
        yield


@asynccontextmanager
async def watch(
    view: Dashboard, llm: ThreadedLLM | AsyncLLM, look: Callable[[], None], interval_s: float = 0.5
) -> AsyncIterator[None]:
    """Call `look` and show the engines in `view` every `interval_s` during the block."""

    async def refresh() -> None:
        while True:
            look()
            view.show_engines(await _engines(llm))
            await asyncio.sleep(interval_s)

    if not view.is_live:
        yield
        return
    task = asyncio.create_task(refresh(), name="view")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _engines(llm: ThreadedLLM | AsyncLLM) -> dict[str, EngineStats]:
    if not isinstance(llm, AsyncLLM):
        return {"own": await llm.stats()}
    results = await llm.client.engine_stats()
    return {str(rank): stats for rank, stats in stats_by_engine(results.by_rank).items()}
