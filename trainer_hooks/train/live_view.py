"""Shows what the engines and the producer do while a step is under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout import AsyncLLM
from rollout.apis.threaded_llm import ThreadedLLM
from rollout.control.reports import EngineStats
from rollout.coordinator.client.fleet_stats import stats_by_engine
from trainer_hooks.metrics import TimeAccount
from trainer_hooks.producer import AsyncRolloutProducer
from trainer_hooks.train.dashboard import Dashboard


@asynccontextmanager
async def watch_step(
    view: Dashboard,
    llm: ThreadedLLM | AsyncLLM,
    producer: AsyncRolloutProducer,
    account: TimeAccount | None = None,
    interval_s: float = 0.5,
) -> AsyncIterator[None]:
    """In the block, show the engines and how many rollouts the next batch has, every `interval_s`.

    `account`: that of the trainer, which says what it does meanwhile.
    Without a terminal there is nothing to redraw, and nobody is asked. A question that the engines
    cannot answer ends the view of them, not the run.
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
    """Each engine of a fleet by its rank, or the trainer's own."""
    if not isinstance(llm, AsyncLLM):
        return {"own": await llm.stats()}
    results = await llm.client.engine_stats()
    return {str(rank): stats for rank, stats in stats_by_engine(results).items()}
