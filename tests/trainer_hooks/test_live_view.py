"""watch_step: what a terminal shows while a step is in progress."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from benchmarks.virtual_time import run_virtually
from tests.trainer_hooks.producer.fake_llm import FakeLLM
from tests.trainer_hooks.test_time_account import stats_of
from trainer_hooks import AsyncRolloutProducer
from trainer_hooks.train import Dashboard, watch_step


class WatchedLLM(FakeLLM):
    """A fake LLM whose first samples take the given seconds, and later ones a second."""

    def __init__(self, *seconds: float) -> None:
        own = iter(seconds)
        super().__init__(lambda: next(own, 1.0), num_tokens=1)
        self.num_asked = 0

    async def stats(self) -> Any:
        self.num_asked += 1
        return stats_of(1.0, 1)


def shown_during_a_batch(is_terminal: bool) -> tuple[list[tuple[int, int]], str, WatchedLLM]:
    # Two samples each of three prompts. After 8 seconds one of each has ended, and one whole group.
    output, llm = io.StringIO(), WatchedLLM(5.0, 30.0, 5.0, 6.0, 5.0, 30.0)
    view = Dashboard(Console(file=output, width=120, force_terminal=is_terminal))
    progress = []

    async def work() -> None:
        def reward(completions: Any) -> list[float]:
            return [1.0] * len(completions)

        async with (
            AsyncRolloutProducer(llm, [[1], [2], [3]], reward, 2, 3, 0) as producer,
            watch_step(view, llm, producer, interval_s=4.0),  # type: ignore[arg-type]
        ):
            progress.append(producer.progress)
            await anext(producer)
            progress.append(producer.progress)

    run_virtually(work())
    view.close()
    return progress, output.getvalue(), llm


def test_watch_step_refreshes_a_terminal_while_a_batch_is_generated() -> None:
    progress, shown, llm = shown_during_a_batch(is_terminal=True)
    assert progress == [(0, 6), (0, 6)], "after the batch comes the next one"
    assert "4 of 6 samples" in shown, "also of groups that have not ended"
    assert "next batch 1.000" in shown
    assert "running" in shown
    assert llm.num_asked >= 2


def test_watch_step_without_a_terminal_asks_no_engine() -> None:
    _, shown, llm = shown_during_a_batch(is_terminal=False)
    assert (shown, llm.num_asked) == ("", 0)


def test_watch_step_survives_engines_that_do_not_answer() -> None:
    async def fails() -> Any:
        raise RuntimeError("gone")

    async def work() -> None:
        llm = WatchedLLM()
        llm.stats = fails  # type: ignore[method-assign]
        producer = AsyncRolloutProducer(llm, [[1]], lambda completions: [1.0], 1, 1, 0)
        view = Dashboard(Console(file=io.StringIO(), force_terminal=True))
        async with producer, watch_step(view, llm, producer):  # type: ignore[arg-type]
            assert (await anext(producer)).rollouts.rewards_B.tolist() == [1.0]
        view.close()

    run_virtually(work())
