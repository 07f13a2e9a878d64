"""Shows what the engines and the producer do while a step is under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout import AsyncLLM
from trainer_hooks.jobs.dashboard import Dashboard
from trainer_hooks.producer import AsyncRolloutProducer
from trainer_hooks.threaded_llm import ThreadedLLM


@asynccontextmanager
async def watch_step(
    view: Dashboard,
    llm: ThreadedLLM | AsyncLLM,
    producer: AsyncRolloutProducer,
    interval_s: float = 0.5,
) -> AsyncIterator[None]:
    """In the block, show the engines and how many rollouts the next batch has, every `interval_s`.

    Without a terminal there is nothing to redraw, and nobody is asked. A question that the engines
    cannot answer ends the view of them, not the run.
    """

    async def look() -> None:
        while True:
            view.show_progress(*producer.progress)
            view.show_engines({"all" if isinstance(llm, AsyncLLM) else "own": await llm.stats()})
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
